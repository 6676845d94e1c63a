// Random walks of the asynchronous PeftCacheManager beside a model: loads that are held back, late,
// failing or timed out, several leases, a prefetch window, pins. After every call the invariants hold,
// everything visible agrees, victims are the model's in the model's order (C3), and every leased
// task's bytes are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "async_peft_model.h"
#include "pagedlora/peft_cache_manager.h"
#include "random_seeds.h"
#include "walked_peft_cache.h"

namespace pagedlora {
namespace {

using testing_support::AsyncPeftModel;
using testing_support::num_steps;
using testing_support::Outcome;
using testing_support::outcome_of;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::TestAdapter;
using testing_support::Visits;
using testing_support::WalkedCache;

class Machine : private WalkedCache {
 public:
  using WalkedCache::drain;
  using WalkedCache::WalkedCache;

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

 private:
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
          model_.host.at(task).is_refill = false;  // its source was tried as well
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
