// Names from many threads: loaded, unloaded, reloaded, pinned and used all at once (design 5,
// promise 3). What registry/ does in Python is done here with the cache's own calls, so that it runs
// under ThreadSanitizer.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::num_steps;
using testing_support::PeftTest;
using testing_support::TestAdapter;

constexpr std::uint32_t kThreads = 32;
constexpr std::size_t kNames = 20;
constexpr std::size_t kContents = 10;
// Of each thread: half a minute in all under ThreadSanitizer, of which num_steps() takes a tenth.
#if defined(__SANITIZE_THREAD__)
constexpr int kOperations = 80'000;
#else
constexpr int kOperations = 2'000;
#endif

// Names that point to tasks. Names of one content share its task; a task that no name points to is
// retired, and forgotten once nobody uses it. Tasks of one content share its source.
class Names {
 public:
  Names(PeftCacheManager& manager, const std::vector<TestAdapter>& contents)
      : manager_(manager), contents_(contents) {}

  struct Target {
    TaskId task;
    std::size_t content;
  };

  std::optional<Target> find(std::size_t name) const {
    const std::scoped_lock lock(mutex_);
    return targets_[name];
  }
  void point(std::size_t name, std::size_t content) {
    const std::scoped_lock lock(mutex_);
    auto live = tasks_.find(content);
    if (live == tasks_.end()) {
      live =
          tasks_.emplace(content, Live{manager_.register_task(contents_[content].plan), 0}).first;
    }
    ++live->second.num_names;
    drop(name);
    targets_[name] = Target{live->second.task, content};
  }
  void remove(std::size_t name) {
    const std::scoped_lock lock(mutex_);
    drop(name);
    forget_retired();
  }
  // Of all names; what is still in use stays retired.
  void remove_all() {
    for (std::size_t name = 0; name < kNames; ++name) {
      remove(name);
    }
  }
  std::size_t num_retired() const {
    const std::scoped_lock lock(mutex_);
    return retired_.size();
  }

 private:
  struct Live {
    TaskId task;
    std::size_t num_names;
  };

  void drop(std::size_t name) {
    const std::optional<Target> target = targets_[name];
    if (!target) {
      return;
    }
    targets_[name].reset();
    const auto live = tasks_.find(target->content);
    if (--live->second.num_names == 0) {
      retired_.push_back(live->second.task);
      tasks_.erase(live);
    }
  }
  void forget_retired() {
    std::erase_if(retired_, [&](TaskId task) {
      try {
        manager_.unregister_task(task);
        return true;
      } catch (const AdapterInUseError&) {
        return false;
      }
    });
  }

  PeftCacheManager& manager_;
  const std::vector<TestAdapter>& contents_;
  mutable std::mutex mutex_;
  std::array<std::optional<Target>, kNames> targets_;
  std::map<std::size_t, Live> tasks_;
  std::vector<TaskId> retired_;
};

// What one thread does.
class User {
 public:
  User(PeftCacheManager& manager, Names& names, const LoraModelConfig& config,
       const std::vector<TestAdapter>& contents, std::atomic<std::uint64_t>& next_request,
       std::uint32_t seed)
      : manager_(manager),
        names_(names),
        config_(config),
        contents_(contents),
        next_request_(next_request),
        rng_(seed) {}

  void one() {
    const std::size_t name = rng_() % kNames;
    switch (rng_() % 7) {
      case 0:
      case 1:  // load and reload: the same, if the name is taken
        names_.point(name, rng_() % kContents);
        break;
      case 2:
        names_.remove(name);
        break;
      case 3:
        pin(name);
        break;
      case 4:
        manager_.evict_unowned(rng_() % 2 == 0 ? Tier::host : Tier::device);
        break;
      default:
        use(name);
    }
  }

  int num_checked() const { return num_checked_; }
  int num_wrong() const { return num_wrong_; }
  int num_failed() const { return num_failed_; }

 private:
  void pin(std::size_t name) {
    const auto target = names_.find(name);
    if (!target) {
      return;
    }
    try {
      manager_.pin(target->task);
      manager_.poll();
      manager_.unpin(target->task);
    } catch (const PeftTaskNotCachedError&) {  // unloaded meanwhile
    } catch (const LoraCacheFullError&) {
    }
  }

  void use(std::size_t name) {
    const auto target = names_.find(name);
    if (!target) {
      return;
    }
    const RequestId request{next_request_++};
    try {
      if (become_owner(request, target->task)) {
        read_in_batch(request, *target);
        if (rng_() % 2 == 0) {
          manager_.mark_request_done(request, true);
          manager_.add_request_peft(request, target->task, nullptr, true);
          read_in_batch(request, *target);
        }
      }
    } catch (const PeftTaskNotCachedError&) {
    } catch (const LoraCacheFullError&) {
    }
    manager_.mark_request_done(request);
  }

  // False: its load failed, or others took its place again and again.
  bool become_owner(RequestId request, TaskId task) {
    for (int attempt = 0; attempt < 200; ++attempt) {
      switch (manager_.adapter_state(request)) {
        case AdapterState::ready:
          return true;
        case AdapterState::failed:
          ++num_failed_;
          return false;
        case AdapterState::waiting:
          manager_.add_request_peft(request, task);
          break;
        case AdapterState::loading:
          manager_.poll(std::chrono::milliseconds(1));
      }
    }
    return false;
  }

  void read_in_batch(RequestId request, const Names::Target& target) {
    std::shared_ptr<BatchLease> lease;
    try {
      lease = manager_.ensure_batch(std::array{request});
    } catch (const InvalidArgumentError&) {  // as many leases are open as may be
      return;
    }
    try {
      const auto held = lease->hold_open();
      for (const BatchLease::LeasedTask& leased : lease->tasks()) {
        const bool right =
            leased.task == target.task &&
            testing_support::holds_adapter(leased.pages, config_, contents_[target.content]);
        num_wrong_ += right ? 0 : 1;
        ++num_checked_;
      }
    } catch (const LeaseClosedError&) {  // by the next batch of another thread
    }
    lease->close();
  }

  PeftCacheManager& manager_;
  Names& names_;
  const LoraModelConfig& config_;
  const std::vector<TestAdapter>& contents_;
  std::atomic<std::uint64_t>& next_request_;
  std::mt19937 rng_;
  int num_checked_ = 0;
  int num_wrong_ = 0;
  int num_failed_ = 0;
};

class NamesThreadsTest : public PeftTest, public ::testing::WithParamInterface<std::size_t> {};

TEST_P(NamesThreadsTest, NothingIsLostAndNobodyReadsAnotherContent) {
  const std::uint32_t seed = testing_support::seeds(1).front();
  const int num_operations = num_steps(kOperations);
  std::cout << testing_support::seed_label(seed) << ", " << num_operations
            << " operations of each of " << kThreads << " threads\n";
  options_.max_inflight_batches = GetParam();
  make_manager(14, 9);  // the contents have 20 pages
  std::vector<TestAdapter> contents;
  for (std::uint32_t content = 0; content < kContents; ++content) {
    contents.push_back(adapter_of(1 + content % 3));
  }
  Names names(*manager_, contents);
  std::atomic<std::uint64_t> next_request{0};
  std::vector<User> users;
  for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
    users.emplace_back(*manager_, names, *config_, contents, next_request,
                       seed * kThreads + thread);
  }
  std::vector<std::thread> threads;
  for (User& user : users) {
    threads.emplace_back([&user, num_operations] {
      for (int operation = 0; operation < num_operations; ++operation) {
        user.one();
      }
    });
  }
  int num_checked = 0;
  for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
    threads[thread].join();
    EXPECT_EQ(users[thread].num_wrong(), 0);
    EXPECT_EQ(users[thread].num_failed(), 0) << "no source fails";
    num_checked += users[thread].num_checked();
  }
  EXPECT_GT(num_checked, num_operations) << "too few batches to prove anything";
  ASSERT_TRUE(manager_->wait_idle(kPatience)) << "nobody waits for ever";
  const PeftCacheStats stats = manager_->stats();
  EXPECT_GT(stats.host.tasks_evicted, kContents);
  EXPECT_GT(stats.device.tasks_evicted, kContents);
  manager_->check_invariants();
  EXPECT_TRUE(manager_->active_tasks().empty());
  EXPECT_TRUE(manager_->paused_tasks().empty());
  names.remove_all();
  EXPECT_EQ(names.num_retired(), 0U) << "somebody owns, pins or leases what nobody uses";
  for (const Tier tier : {Tier::host, Tier::device}) {
    EXPECT_EQ(manager_->resident_tasks(tier), 0U);
    EXPECT_EQ(manager_->free_pages(tier), manager_->max_pages(tier));
  }
  for (const TestAdapter& content : contents) {
    EXPECT_EQ(content.source->live_readers, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(LeasesOpenTogether, NamesThreadsTest, ::testing::Values(1U, 40U));

}  // namespace
}  // namespace pagedlora
