// Random walks of the asynchronous PeftCacheManager beside a model: loads that are held back, late,
// failing or timed out, several leases, a prefetch window, pins. After every call the invariants hold,
// everything visible agrees, victims are the model's in the model's order (C3), and every leased
// task's bytes are right.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <thread>

#include "async_peft_model.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::AsyncPeftModel;
using testing_support::FakeDevice;
using testing_support::FakeSource;
using testing_support::float32_model;
using testing_support::holds_adapter;
using testing_support::make_adapter;
using testing_support::num_steps;
using testing_support::Outcome;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::TestAdapter;

template <class Call>
Outcome outcome_of(Call&& call) {
  try {
    call();
    return Outcome::ok;
  } catch (const RequestConflictError&) {
    return Outcome::conflict;
  } catch (const PeftTaskNotCachedError&) {
    return Outcome::not_cached;
  } catch (const AdapterTooLargeError&) {
    return Outcome::too_large;
  } catch (const LoraCacheFullError&) {
    return Outcome::full;
  }
}

// How often the walk came by what it is meant to check.
struct Visits {
  int failed_loads = 0;
  int refused_batches = 0;
  int partial_batches = 0;
  int evictions = 0;
  int revoked = 0;
};

class Machine {
 public:
  Machine(std::uint32_t seed, Visits& visits)
      : rng_(seed), max_inflight_(1 + seed % 3), visits_(visits) {
    for (int i = 0; i < kRegistered; ++i) {
      register_one(make_adapter(*config_, {1 + pick(40)}, ++value_));
    }
    for (std::size_t task = 0; task < kCarried; ++task) {
      for (TestAdapter& adapter : carried_[task]) {
        adapter = make_adapter(*config_, {1 + pick(40)}, ++value_);
        sources_.push_back(adapter.source);
      }
    }
  }
  ~Machine() {
    open_all_gates();
    manager_.close();
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void step() {
    const std::uint32_t action = pick(100);
    if (action < 26) {
      add();
    } else if (action < 42) {
      mark_done(pick(4) == 0);
    } else if (action < 62) {
      poll();
    } else if (action < 76) {
      ensure();
    } else if (action < 82) {
      close_a_lease();
    } else if (action < 89) {
      prefetch();
    } else if (action < 94) {
      disturb();
    } else if (action < 96) {
      pin_or_unpin();
    } else if (action < 97) {
      manager_.reset_device_cache();
      model_.demote_all();
    } else {
      const Tier tier = pick(2) == 0 ? Tier::host : Tier::device;
      manager_.evict_unowned(tier);
      model_.evict_unowned(tier);
    }
    if (!::testing::Test::HasFatalFailure()) {
      compare();
    }
  }

  // Everything ends, and nothing is left.
  void drain() {
    open_all_gates();
    leases_.clear();
    for (std::uint64_t request = 0; request < kRequests; ++request) {
      manager_.mark_request_done(RequestId{request});
    }
    ASSERT_TRUE(manager_.wait_idle(std::chrono::hours(1)));
    for (const auto& [task, info] : model_.tasks) {
      for (int pins = info.user_pins; pins > 0 && manager_.load_error(task) == nullptr; --pins) {
        manager_.unpin(task);
      }
    }
    for (const Tier tier : {Tier::host, Tier::device}) {
      manager_.evict_unowned(tier);
      ASSERT_EQ(manager_.free_pages(tier), manager_.max_pages(tier)) << "pages are lost";
    }
    ASSERT_TRUE(manager_.active_tasks().empty() && manager_.paused_tasks().empty());
    ASSERT_NO_THROW(manager_.check_invariants());
  }

 private:
  static constexpr std::size_t kHostPages = 12;
  static constexpr std::size_t kDevicePages = 9;
  static constexpr std::size_t kPageBytes = 512;
  static constexpr int kRegistered = 7;
  static constexpr std::uint32_t kRequests = 9;
  static constexpr std::size_t kCarried = 2;
  static constexpr Clock::Time kLimit = std::chrono::seconds(10);

  PeftCacheOptions options() {
    PeftCacheOptions options;
    options.host_cache_bytes = kHostPages * kPageBytes;
    options.device_cache_bytes = kDevicePages * kPageBytes;
    options.page_bytes = kPageBytes;
    options.num_put_workers = 3;
    options.max_inflight_batches = max_inflight_;
    options.load_timeout = kLimit;
    options.clock = clock_;
    options.on_evict = [this](Tier tier, TaskId task) { evictions_.emplace_back(tier, task); };
    return options;
  }

  std::uint32_t pick(std::size_t choices) { return static_cast<std::uint32_t>(rng_() % choices); }
  RequestId pick_request() { return RequestId{pick(kRequests)}; }

  void register_one(const TestAdapter& adapter) {
    const TaskId task = manager_.register_task(adapter.plan);
    const std::size_t pages = manager_.num_pages_of(task);
    registered_.push_back(task);
    content_[task] = adapter;
    sources_.push_back(adapter.source);
    model_.tasks[task].pages = pages;
    model_.largest = std::max(model_.largest, pages);
  }
  TaskId pick_task() {
    return pick(4) == 0 ? TaskId{pick(kCarried)} : registered_[pick(registered_.size())];
  }

  void add() {
    const RequestId request = pick_request();
    const TaskId task = pick_task();
    const bool started = pick(5) == 0;
    std::optional<AsyncPeftModel::Task> weights;
    CarriedWeights carried;
    if (task.value < kCarried && pick(3) != 0) {
      const std::uint32_t version = pick(2);
      const TestAdapter& adapter = carried_[task.value][version];
      weights =
          AsyncPeftModel::Task{manager_.num_pages_of(*adapter.plan), 1 + static_cast<int>(version)};
      carried = {adapter.plan, "version " + std::to_string(version)};
    }
    const std::size_t owners_before = model_.lives.size();
    const Outcome outcome = outcome_of(
        [&] { manager_.add_request_peft(request, task, weights ? &carried : nullptr, started); });
    ASSERT_EQ(outcome, model_.add(request, task, weights, started));
    visits_.revoked += model_.lives.size() < owners_before ? 1 : 0;
    if (task.value < kCarried && model_.tasks.contains(task)) {
      const int version = model_.tasks.at(task).version;
      content_[task] = carried_[task.value][static_cast<std::size_t>(version) - 1];
    }
  }

  void mark_done(bool pause) {
    const RequestId request = pick_request();
    manager_.mark_request_done(request, pause);
    model_.mark_done(request, pause);
  }

  // Takes over some of the loads that have ended, as another rank's answer might demand.
  void poll() {
    if (pick(8) == 0) {
      std::this_thread::yield();
    }
    std::vector<LoadOutcome> taken;
    const auto failed = manager_.poll({}, [&](const std::vector<LoadOutcome>& ended) {
      for (LoadOutcome outcome : ended) {
        if (pick(3) != 0) {
          outcome.loaded = outcome.loaded && pick(30) != 0;
          taken.push_back(outcome);
        }
      }
      return taken;
    });
    for (const LoadOutcome& outcome : taken) {
      visits_.failed_loads += outcome.loaded ? 0 : 1;
      model_.apply(outcome.task, outcome.tier, outcome.loaded);
    }
    std::erase_if(model_.newly_failed,
                  [&](RequestId request) { return !model_.failed.contains(request); });
    std::ranges::sort(model_.newly_failed);
    const auto repeated = std::ranges::unique(model_.newly_failed);
    model_.newly_failed.erase(repeated.begin(), repeated.end());
    ASSERT_EQ(failed, std::exchange(model_.newly_failed, {})) << "C1: told once";
  }

  void ensure() {
    if (leases_.size() == max_inflight_) {
      if (max_inflight_ == 1) {
        model_.close_lease(leases_.front().tasks);  // which the call does itself
      } else {
        close_a_lease();
        return;
      }
    }
    std::vector<RequestId> batch(pick(4));
    for (RequestId& request : batch) {
      request = pick_request();
    }
    const bool reset = pick(30) == 0;
    open_all_gates();  // it waits for its loads
    std::shared_ptr<BatchLease> lease;
    const Outcome outcome = outcome_of([&] { lease = manager_.ensure_batch(batch, reset); });
    if (max_inflight_ == 1) {
      ASSERT_TRUE(leases_.empty() || !leases_.front().lease->is_open()) << "L2";
      leases_.clear();
    }
    std::vector<TaskId> tasks;
    ASSERT_EQ(outcome, model_.claim_batch(batch, reset, tasks));
    if (outcome != Outcome::ok) {
      ++visits_.refused_batches;
      return;
    }
    follow_batch(batch, tasks, *lease);
    leases_.push_back({lease, tasks_of(*lease)});
  }

  static std::vector<TaskId> tasks_of(const BatchLease& lease) {
    std::vector<TaskId> tasks;
    for (const BatchLease::LeasedTask& leased : lease.tasks()) {
      tasks.push_back(leased.task);
    }
    return tasks;
  }

  // What the batch's loads came to is seen from outside; the model checks that it may be so.
  void follow_batch(const std::vector<RequestId>& batch, const std::vector<TaskId>& tasks,
                    const BatchLease& lease) {
    const std::vector<TaskId> leased = tasks_of(lease);
    std::set<RequestId> errors;
    for (const RequestId request : batch) {
      const auto life = model_.lives.find(request);
      if (life == model_.lives.end() || life->second.is_paused) {
        errors.insert(request);
      }
    }
    for (const TaskId task : tasks) {
      const bool in_lease = std::ranges::find(leased, task) != leased.end();
      if (model_.host.at(task).is_loading) {
        if (manager_.is_task_cached(task, Tier::host)) {
          model_.apply(task, Tier::host, true);
        } else if (has_failed_owner(task)) {
          model_.apply(task, Tier::host, false);
        }
      }
      for (const RequestId request : batch) {
        if (model_.task_of(request) == task && (!in_lease || model_.failed.contains(request))) {
          errors.insert(request);
        }
      }
      model_.settle_batch(batch, task, in_lease);
    }
    visits_.partial_batches += leased.size() < tasks.size() ? 1 : 0;
    ASSERT_EQ(lease.errors().size(), errors.size());
    for (const RequestId request : errors) {
      ASSERT_TRUE(lease.errors().contains(request)) << request.value;
    }
    check_content(lease);
  }
  bool has_failed_owner(TaskId task) {
    return std::ranges::any_of(model_.lives, [&](const auto& item) {
      return item.second.task == task && manager_.adapter_state(item.first) == AdapterState::failed;
    });
  }
  void check_content(const BatchLease& lease) {
    for (const BatchLease::LeasedTask& leased : lease.tasks()) {
      ASSERT_TRUE(holds_adapter(leased.pages, *config_, content_.at(leased.task)))
          << "wrong bytes of task " << leased.task.value;
    }
  }

  void close_a_lease() {
    if (leases_.empty()) {
      return;
    }
    const auto chosen = leases_.begin() + pick(leases_.size());
    check_content(*chosen->lease);  // nothing was written under it
    if (pick(2) == 0) {
      chosen->lease->close();
    }
    model_.close_lease(chosen->tasks);
    leases_.erase(chosen);
  }

  void prefetch() {
    std::vector<TaskId> window(pick(6));
    for (TaskId& task : window) {
      task = pick_task();
    }
    manager_.prefetch(window);
    model_.prefetch(window);
  }

  // Holds loads back, lets them go, makes them fail, or lets their time pass.
  void disturb() {
    const FakeSource& source = *sources_[pick(sources_.size())];
    switch (pick(10)) {
      case 0:
      case 1:
        source.gate.close();
        break;
      case 2:
        device_->copies.close();
        break;
      case 3:
      case 4:
        open_all_gates();
        break;
      case 5:
        source.fail_open = true;
        break;
      case 6:
        source.fail_read_after = 0;
        break;
      case 7:
        source.fail_finish = true;
        break;
      case 8:
        device_->fail_copy_after = static_cast<int>(pick(2));
        break;
      default:
        clock_->advance(kLimit / 2);
        break;
    }
  }
  void open_all_gates() {
    for (const auto& source : sources_) {
      source->gate.open();
    }
    device_->copies.open();
  }

  void pin_or_unpin() {
    const TaskId task = pick_task();
    const auto found = model_.tasks.find(task);
    if (found != model_.tasks.end() && found->second.user_pins > 0) {
      manager_.unpin(task);
      model_.unpin(task);
      return;
    }
    const Outcome outcome = outcome_of([&] { manager_.pin(task); });
    ASSERT_EQ(outcome, model_.pin(task));
  }

  void compare() {
    ASSERT_NO_THROW(manager_.check_invariants());
    ASSERT_EQ(evictions_, model_.evictions) << "C3: other victims, or in another order";
    visits_.evictions += static_cast<int>(evictions_.size());
    evictions_.clear();
    model_.evictions.clear();
    for (const Tier tier : {Tier::host, Tier::device}) {
      const AsyncPeftModel::Tier& expected = tier == Tier::host ? model_.host : model_.device;
      ASSERT_EQ(manager_.free_pages(tier), model_.free_pages(tier));
      ASSERT_EQ(manager_.resident_tasks(tier), expected.size());
      for (const auto& [task, copy] : expected) {
        ASSERT_EQ(manager_.is_task_cached(task, tier), !copy.is_loading) << task.value;
      }
    }
    for (std::uint64_t request = 0; request < kRequests; ++request) {
      ASSERT_EQ(manager_.adapter_state(RequestId{request}), model_.state_of(RequestId{request}));
    }
    std::array<std::unordered_map<TaskId, std::set<RequestId>>, 2> owners;
    for (const auto& [request, life] : model_.lives) {
      owners[life.is_paused ? 1 : 0][life.task].insert(request);
    }
    ASSERT_EQ(manager_.active_tasks(), owners[0]);
    ASSERT_EQ(manager_.paused_tasks(), owners[1]);
  }

  struct OpenLease {
    std::shared_ptr<BatchLease> lease;
    std::vector<TaskId> tasks;
  };

  std::mt19937 rng_;
  const std::size_t max_inflight_;
  Visits& visits_;
  const std::shared_ptr<const LoraModelConfig> config_ = float32_model({{8, 8}});
  const std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  std::vector<AsyncPeftModel::Eviction> evictions_;
  PeftCacheManager manager_{config_, options(), device_, eviction_policy_factory("lru")};
  AsyncPeftModel model_{kHostPages, kDevicePages};
  std::vector<TaskId> registered_;
  std::array<std::array<TestAdapter, 2>, kCarried> carried_;
  std::map<TaskId, TestAdapter> content_;
  std::vector<std::shared_ptr<FakeSource>> sources_;
  std::vector<OpenLease> leases_;
  int value_ = 0;
};

void walk(std::uint32_t seed, int steps, Visits& visits) {
  SCOPED_TRACE(seed_label(seed));
  Machine machine(seed, visits);
  for (int i = 0; i < steps; ++i) {
    machine.step();
    if (::testing::Test::HasFatalFailure()) {
      FAIL() << "at step " << i;
    }
  }
  machine.drain();
}

TEST(PeftAsyncMachineTest, AgreesWithAModelThroughAMillionCalls) {
  Visits visits;
  for (const std::uint32_t seed : seeds(20)) {
    walk(seed, num_steps(50'000), visits);
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  for (const int count : {visits.failed_loads, visits.refused_batches, visits.partial_batches,
                          visits.evictions, visits.revoked}) {
    EXPECT_GT(count, 10) << "the walk does not come by everything";
  }
}

}  // namespace
}  // namespace pagedlora
