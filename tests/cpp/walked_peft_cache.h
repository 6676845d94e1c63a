// A cache, its model, and what disturbs its loads, for walks that call both: after every step they must
// agree on everything that can be seen.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "async_peft_model.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"

namespace pagedlora::testing_support {

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

class WalkedCache {
 public:
  WalkedCache(std::uint32_t seed, Visits& visits)
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
  ~WalkedCache() {
    open_all_gates();
    manager_.close();
  }
  WalkedCache(const WalkedCache&) = delete;
  WalkedCache& operator=(const WalkedCache&) = delete;

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

 protected:
  static constexpr std::size_t kHostPages = 12;
  static constexpr std::size_t kDevicePages = 9;
  static constexpr std::size_t kPageBytes = 512;
  static constexpr int kRegistered = 7;
  static constexpr std::uint32_t kRequests = 9;
  static constexpr std::size_t kCarried = 2;
  static constexpr Clock::Time kLimit = std::chrono::seconds(10);

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

  void check_content(const BatchLease& lease) {
    for (const BatchLease::LeasedTask& leased : lease.tasks()) {
      ASSERT_TRUE(holds_adapter(leased.pages, *config_, content_.at(leased.task)))
          << "wrong bytes of task " << leased.task.value;
    }
  }

  static std::vector<TaskId> tasks_of(const BatchLease& lease) {
    std::vector<TaskId> tasks;
    for (const BatchLease::LeasedTask& leased : lease.tasks()) {
      tasks.push_back(leased.task);
    }
    return tasks;
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

 private:
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
};

}  // namespace pagedlora::testing_support
