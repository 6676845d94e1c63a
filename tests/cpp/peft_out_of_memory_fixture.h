// One call at a time, once for each of its allocations with that allocation failing: nothing is lost,
// a call that throws has changed nothing, and the same call works once there is memory again. Tests say
// which call, and in which state.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "failing_new.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora::testing_support {

// What a call may change although it throws.
enum class Allowed {
  nothing,
  evictions,    // victims stay evicted
  revocations,  // and owners that gave their place to one that has started wait again
  progress,     // loads of others that ended take effect, or those of a window were begun
};

class PeftOutOfMemoryTest : public PeftAsyncTest {
 protected:
  using Step = std::function<void()>;

  // `prepare` brings a manager into the state in which `call` is made.
  struct Scenario {
    Step prepare;
    Step call;
    Allowed allowed = Allowed::nothing;
  };

  PeftOutOfMemoryTest() {
    options_.clock = nullptr;
    options_.load_timeout = std::chrono::hours(1);
    options_.num_put_workers = 1;
  }

  // With each allocation of the call failing in turn, until it has no more.
  void run(const Scenario& scenario) {
    int number = 0;
    for (bool has_failed = true; has_failed; ++number) {
      SCOPED_TRACE("allocation " + std::to_string(number));
      has_failed = run_once(scenario, number);
      if (HasFailure()) {
        return;
      }
    }
    num_allocations_ = number - 1;
  }

  // The same for the allocations of the workers, until what the call began has ended.
  void run_with_failing_workers(const Scenario& scenario) {
    bool has_failed = true;
    for (int number = 0; has_failed; ++number) {
      SCOPED_TRACE("allocation " + std::to_string(number) + " of the workers");
      start(scenario);
      FailingNew::arm(FailingNew::Who::other_threads, number);
      scenario.call();
      const bool is_idle = manager_->wait_idle(std::chrono::seconds(20));
      FailingNew::disarm();
      has_failed = FailingNew::has_failed();
      ASSERT_TRUE(is_idle) << "a load without end";
      ASSERT_NO_THROW(manager_->check_invariants());
      for (const auto& [request, task] : requests_) {
        const std::exception_ptr error = manager_->adapter_error(RequestId{request});
        ASSERT_TRUE(error == nullptr || holds<std::bad_alloc>(error));
      }
      finish();
    }
  }

  // A request that the scenario adds, whose content is compared in the end.
  void own(std::uint64_t request, TaskId task) { requests_[request] = task; }
  void add_owner(std::uint64_t request, TaskId task) {
    add(request, task);
    own(request, task);
  }
  TaskId register_on_device(std::uint32_t pages) {
    const TaskId task = register_adapter(pages);
    add(kSetUpRequest, task);
    ensure_and_close({kSetUpRequest});
    done(kSetUpRequest);
    return task;
  }
  void wait_until_ended(std::size_t num_loads) {
    ASSERT_TRUE(comes_true([&] { return ended().size() == num_loads; }));
  }

  static constexpr std::uint64_t kSetUpRequest = 1000;
  static constexpr TaskId kCarriedVictim{5};
  std::map<std::uint64_t, TaskId> requests_;
  std::map<std::uint64_t, std::string> carried_;  // digests, by request
  std::shared_ptr<BatchLease> lease_;             // of the call
  int num_allocations_ = 0;

 private:
  using Copies = std::set<std::pair<Tier, TaskId>>;

  struct Picture {
    std::unordered_map<TaskId, std::set<RequestId>> active;
    std::unordered_map<TaskId, std::set<RequestId>> paused;
    std::map<std::uint64_t, bool> started;
    std::size_t free_host = 0;
    std::size_t free_device = 0;
    Copies resident;
    std::size_t num_open = 0;

    friend bool operator==(const Picture&, const Picture&) = default;
  };

  void start(const Scenario& scenario) {
    lease_.reset();
    manager_.reset();
    adapters_.clear();
    requests_.clear();
    carried_.clear();
    scenario.prepare();
    ASSERT_NO_THROW(manager_->check_invariants());
  }

  Picture picture() const {
    Picture now;
    now.active = manager_->active_tasks();
    now.paused = manager_->paused_tasks();
    for (const auto& [request, task] : requests_) {
      now.started[request] = manager_->has_started(RequestId{request});
    }
    now.free_host = manager_->free_pages(Tier::host);
    now.free_device = manager_->free_pages(Tier::device);
    for (const Tier tier : {Tier::host, Tier::device}) {
      for (const auto& [task, adapter] : adapters_) {
        if (manager_->is_task_cached(task, tier)) {
          now.resident.emplace(tier, task);
        }
      }
    }
    now.num_open = manager_->open_lease_tasks().size();
    return now;
  }

  // Whether an allocation failed.
  bool run_once(const Scenario& scenario, int number) {
    start(scenario);
    const Picture before = picture();
    std::exception_ptr error;
    FailingNew::arm(FailingNew::Who::this_thread, number);
    try {
      scenario.call();
    } catch (...) {
      FailingNew::disarm();
      error = std::current_exception();
    }
    FailingNew::disarm();
    const bool has_failed = FailingNew::has_failed();
    EXPECT_NO_THROW(manager_->check_invariants());
    if (error != nullptr) {
      EXPECT_TRUE(has_failed && holds<std::bad_alloc>(error));
      expect_unchanged(before, scenario.allowed);
      EXPECT_NO_THROW(scenario.call()) << "with memory";
      EXPECT_NO_THROW(manager_->check_invariants());
    }
    finish();
    return has_failed;
  }

  void expect_unchanged(const Picture& before, Allowed allowed) {
    const Picture after = picture();
    if (allowed == Allowed::revocations) {
      EXPECT_EQ(manager_->task_of(RequestId{1}), std::nullopt);
    } else {
      EXPECT_EQ(after.active, before.active);
    }
    EXPECT_EQ(after.paused, before.paused);
    EXPECT_EQ(after.started, before.started);
    EXPECT_EQ(after.num_open, before.num_open);
    if (allowed == Allowed::nothing) {
      EXPECT_TRUE(after == before) << "residency has changed";
    } else if (allowed == Allowed::progress) {
      EXPECT_TRUE(std::ranges::includes(after.resident, before.resident));
    } else {
      EXPECT_TRUE(std::ranges::includes(before.resident, after.resident));
    }
  }

  // Everybody is served in the end, and nothing is left when everybody is done.
  void finish() {
    ASSERT_TRUE(manager_->wait_idle(kPatience));
    manager_->poll();
    for (const auto& [request, task] : requests_) {
      for (int i = 0; i < 3 && state_of(request) != AdapterState::ready; ++i) {
        done(request);
        add_again(request, task);
        ASSERT_TRUE(manager_->wait_idle(kPatience));
      }
      ASSERT_EQ(state_of(request), AdapterState::ready);
      add_again(request, task);  // if it is paused
      ASSERT_TRUE(content_is_right(*ensure({request}), request));
      ASSERT_NO_THROW(manager_->check_invariants());
    }
    lease_.reset();
    for (const auto& [request, task] : requests_) {
      done(request);
    }
    manager_->prefetch({});
    for (const Tier tier : {Tier::host, Tier::device}) {
      manager_->evict_unowned(tier);
      ASSERT_NO_THROW(manager_->check_invariants());
    }
    EXPECT_EQ(manager_->free_pages(Tier::host), manager_->max_pages(Tier::host));
    EXPECT_EQ(manager_->free_pages(Tier::device), manager_->max_pages(Tier::device));
  }
  void add_again(std::uint64_t request, TaskId task) {
    const auto carried = carried_.find(request);
    const std::string digest = carried == carried_.end() ? std::string() : carried->second;
    const CarriedWeights weights{adapters_.at(task).plan, digest};
    manager_->add_request_peft(RequestId{request}, task, digest.empty() ? nullptr : &weights, true);
  }
};

}  // namespace pagedlora::testing_support
