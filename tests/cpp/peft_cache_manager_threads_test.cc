// Calls from several threads at once; to be run under ThreadSanitizer (design 3.4, L8).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::FakeDevice;
using testing_support::FakeSource;
using testing_support::num_steps;
using testing_support::PeftTest;
using testing_support::TestAdapter;

class PeftThreadsTest : public PeftTest {
 protected:
  static constexpr std::uint32_t kThreads = 8;

  // Runs body(thread, rng) on every thread.
  template <class Body>
  static void on_all_threads(Body body) {
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([i, body] {
        std::mt19937 rng(i + 1);
        body(i, rng);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

// Everything that threads may do to one manager at the same time.
class MixedCalls {
 public:
  MixedCalls(PeftCacheManager& manager, const LoraModelConfig& config,
             const std::map<TaskId, TestAdapter>& adapters, FakeDevice& device)
      : manager_(manager), config_(config), adapters_(adapters), device_(device) {
    for (const auto& [task, adapter] : adapters_) {
      tasks_.push_back(task);
    }
  }

  void one(std::uint32_t thread, std::mt19937& rng) {
    const RequestId request{thread * 100 + rng() % 4};
    const TaskId task = tasks_[rng() % tasks_.size()];
    try {
      switch (rng() % 12) {
        case 0:
        case 1:
          manager_.add_request_peft(request, task, nullptr, rng() % 4 == 0);
          break;
        case 2:
        case 3:
          manager_.mark_request_done(request, rng() % 2 == 0);
          break;
        case 4:
        case 5:
          batch({request, RequestId{thread * 100 + rng() % 4}}, rng);
          break;
        case 6:
          manager_.read_task(
              task, rng() % 2 == 0 ? Tier::host : Tier::device,
              [&](const TaskPages& pages, const AdapterPlan& /*plan*/) { check(pages, task); });
          break;
        case 7:
          manager_.prefetch(std::vector{task, tasks_[rng() % tasks_.size()]});
          break;
        case 8:
          static_cast<void>(manager_.poll(std::chrono::microseconds(rng() % 50)));
          break;
        case 9:
          disturb(rng);
          break;
        case 10:
          manager_.pin(task);
          manager_.unpin(task);
          break;
        default:
          ask(request, task);
      }
    } catch (const Error&) {  // full, conflicts, not cached: the others are in the way
    } catch (const testing_support::CopyFailure&) {  // of the copy that read_task makes
    }
  }

  int num_wrong() const { return wrong_; }
  int num_leased() const { return leased_; }

 private:
  void batch(const std::vector<RequestId>& requests, std::mt19937& rng) {
    const auto lease = manager_.ensure_batch(requests, rng() % 8 == 0);
    if (rng() % 2 == 0) {
      return;  // dropped
    }
    try {
      const auto held = lease->hold_open();
      for (const BatchLease::LeasedTask& leased : lease->tasks()) {
        check(leased.pages, leased.task);
        ++leased_;
      }
    } catch (const LeaseClosedError&) {  // by the next batch of another thread
    }
    lease->close();
  }
  void check(const TaskPages& pages, TaskId task) {
    wrong_ += testing_support::holds_adapter(pages, config_, adapters_.at(task)) ? 0 : 1;
  }
  void disturb(std::mt19937& rng) {
    const FakeSource& source = *adapters_.at(tasks_[rng() % tasks_.size()]).source;
    switch (rng() % 6) {
      case 0:
        source.fail_open = true;
        break;
      case 1:
        source.fail_read_after = 0;
        break;
      case 2:
        device_.fail_copy_after = 0;
        break;
      default:
        manager_.evict_unowned(rng() % 2 == 0 ? Tier::host : Tier::device);
        manager_.reset_device_cache();
    }
  }
  void ask(RequestId request, TaskId task) const {
    manager_.check_invariants();
    static_cast<void>(manager_.stats());
    static_cast<void>(manager_.active_tasks());
    static_cast<void>(manager_.open_lease_tasks());
    static_cast<void>(manager_.adapter_state(request));
    static_cast<void>(manager_.adapter_error(request));
    static_cast<void>(manager_.load_error(task));
    static_cast<void>(manager_.is_task_cached(task, Tier::device));
  }

  PeftCacheManager& manager_;
  const LoraModelConfig& config_;
  const std::map<TaskId, TestAdapter>& adapters_;
  FakeDevice& device_;
  std::vector<TaskId> tasks_;
  std::atomic<int> wrong_{0};
  std::atomic<int> leased_{0};
};

TEST_F(PeftThreadsTest, L8_CallsOfAllKindsMayMeet) {
#if defined(__SANITIZE_THREAD__)
  constexpr std::chrono::seconds kDuration{20};
#else
  constexpr std::chrono::seconds kDuration{2};
#endif
  for (const std::size_t max_inflight : {1U, 3U}) {
    options_.max_inflight_batches = max_inflight;
    make_manager(14, 9);
    adapters_.clear();
    for (std::uint32_t i = 0; i < 8; ++i) {
      register_adapter(1 + i % 3);
    }
    MixedCalls calls(*manager_, *config_, adapters_, *device_);
    const auto end = std::chrono::steady_clock::now() + kDuration / 2;
    on_all_threads([&](std::uint32_t thread, std::mt19937& rng) {
      while (std::chrono::steady_clock::now() < end) {
        calls.one(thread, rng);
      }
    });
    EXPECT_EQ(calls.num_wrong(), 0);
    EXPECT_GT(calls.num_leased(), 0);
    EXPECT_TRUE(manager_->wait_idle(kPatience)) << "nobody waits for ever";
    manager_->check_invariants();
  }
}

TEST_F(PeftThreadsTest, ClosingMeetsCallsOfAllKinds) {
  for (int repeat = 0; repeat < num_steps(40) + 2; ++repeat) {
    make_manager(14, 9);
    adapters_.clear();
    for (std::uint32_t i = 0; i < 6; ++i) {
      register_adapter(1 + i % 3);
    }
    MixedCalls calls(*manager_, *config_, adapters_, *device_);
    on_all_threads([&](std::uint32_t thread, std::mt19937& rng) {
      for (int step = 0; step < 60; ++step) {
        calls.one(thread, rng);
        if (thread == 0 && step == 30) {
          manager_->close();
        }
      }
    });
    EXPECT_EQ(calls.num_wrong(), 0);
    manager_->check_invariants();
  }
}

TEST_F(PeftThreadsTest, L2_OfBatchesThatMeetOnlyTheLastKeepsItsLease) {
  make_manager(8, 8);
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    add(thread, register_adapter(1));
  }
  std::vector<std::vector<std::shared_ptr<BatchLease>>> leases(kThreads);
  std::barrier together(kThreads);
  on_all_threads([&](std::uint32_t thread, std::mt19937& /*rng*/) {
    for (int step = 0; step < num_steps(5'000); ++step) {
      const std::vector<RequestId> batch{RequestId{thread}};
      together.arrive_and_wait();
      leases[thread].push_back(manager_->ensure_batch(batch));
    }
  });
  std::ptrdiff_t open = 0;
  for (const auto& of_thread : leases) {
    open += std::ranges::count_if(of_thread, [](const auto& lease) { return lease->is_open(); });
  }
  EXPECT_EQ(open, 1);
  manager_.reset();  // and no lease that outlives it reaches back
  leases.clear();
}

TEST_F(PeftThreadsTest, ALeaseMayBeClosedByAnotherThreadThanItsBatchs) {
  make_manager(8, 2);
  for (std::uint64_t request = 0; request < 2; ++request) {
    add(request, register_adapter(2));
  }
  for (int step = 0; step < num_steps(2'000); ++step) {
    const auto lease = ensure({static_cast<std::uint64_t>(step % 2)});
    std::thread closer([&] { lease->close(); });
    static_cast<void>(manager_->free_pages(Tier::device));
    lease->close();
    closer.join();
    EXPECT_FALSE(lease->is_open());
  }
}

}  // namespace
}  // namespace pagedlora
