// Random walks of PeftCacheManager beside a model: after every call the invariants hold and
// everything visible agrees; every leased task's bytes are right.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "peft_model.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::CopyFailure;
using testing_support::FakeDevice;
using testing_support::FakeSource;
using testing_support::float32_model;
using testing_support::holds_adapter;
using testing_support::make_adapter;
using testing_support::num_steps;
using testing_support::Outcome;
using testing_support::PeftModel;
using testing_support::PlannedFailures;
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
  } catch (const AdapterNotFoundError&) {
    return Outcome::failed;
  } catch (const AdapterReadError&) {
    return Outcome::failed;
  } catch (const AdapterSourceChangedError&) {
    return Outcome::failed;
  } catch (const CopyFailure&) {
    return Outcome::failed;
  }
}

class Machine {
 public:
  explicit Machine(std::uint32_t seed) : rng_(seed) {
    for (int i = 0; i < kRegistered; ++i) {
      register_one(random_adapter(20));
    }
    register_one(make_adapter(*config_, {60, 60, 60}, ++value_));  // never fits
    for (auto& versions : carried_) {
      for (TestAdapter& adapter : versions) {
        adapter = random_adapter(24);
      }
    }
  }

  void step() {
    const std::uint32_t action = pick(100);
    if (action < 36) {
      add();
    } else if (action < 62) {
      mark_done(pick(6) == 0);
    } else if (action < 68) {
      mark_done(true);
    } else if (action < 94) {
      ensure();
    } else if (action < 96) {
      close_lease();
    } else if (action < 97) {
      manager_.reset_device_cache();
      model_.demote_all();
    } else if (action < 99) {
      const bool on_host = pick(2) == 0;
      manager_.evict_unowned(on_host ? Tier::host : Tier::device);
      model_.evict_unowned(on_host);
    } else if (tasks_.size() < kRegistered * 2) {
      register_one(random_adapter(20));
    }
    ASSERT_NO_THROW(manager_.check_invariants());
    compare();
  }

  const PeftModel& model() const { return model_; }

 private:
  static constexpr std::size_t kHostPages = 26;
  static constexpr std::size_t kDevicePages = 20;
  static constexpr std::size_t kPageBytes = 512;
  static PeftCacheOptions options() {
    return {.host_cache_bytes = kHostPages * kPageBytes,
            .device_cache_bytes = kDevicePages * kPageBytes,
            .page_bytes = kPageBytes,
            .num_ensure_workers = 1};  // so that copies are made in call order
  }
  static constexpr int kRegistered = 7;
  static constexpr std::uint32_t kRequests = 9;
  static constexpr std::size_t kCarried = 3;

  std::uint32_t pick(std::size_t choices) { return static_cast<std::uint32_t>(rng_() % choices); }

  TestAdapter random_adapter(std::uint32_t max_rank) {
    std::vector<std::uint32_t> ranks{1 + pick(max_rank), 0, 0};
    ranks[1] = pick(2) * (1 + pick(max_rank / 2));
    ranks[2] = pick(2) * (1 + pick(max_rank / 2));
    return make_adapter(*config_, ranks, ++value_);
  }
  void register_one(const TestAdapter& adapter) {
    const TaskId task = manager_.register_task(adapter.plan);
    tasks_.push_back(task);
    content_[task] = adapter;
    model_.register_task(task, manager_.num_pages_of(task));
  }

  PlannedFailures random_failures() {
    PlannedFailures failures;
    const std::uint32_t kind = pick(24);
    failures.open = kind == 0;
    failures.read = kind == 1 || kind == 2;
    failures.copy_after = kind == 3 ? static_cast<int>(pick(2)) : -1;
    return failures;
  }
  void program(const FakeSource* source, const PlannedFailures& failures, bool at_finish) {
    device_->fail_copy_after = failures.copy_after < 0 ? FakeDevice::kNever : failures.copy_after;
    if (source != nullptr) {
      source->fail_open = failures.open;
      source->fail_read_after = failures.read && !at_finish ? 0 : FakeSource::kNever;
      source->fail_finish = failures.read && at_finish;
    }
  }

  void add() {
    const RequestId request{pick(kRequests)};
    TaskId task = tasks_[pick(tasks_.size())];
    const FakeSource* source = content_.at(task).source.get();
    std::optional<PeftModel::Weights> weights;
    CarriedWeights carried;
    if (pick(3) == 0) {
      task = TaskId{pick(kCarried)};
      const std::uint32_t version = pick(2);
      const TestAdapter& adapter = carried_[task.value][version];
      source = nullptr;
      if (pick(4) != 0) {
        weights = {static_cast<int>(version), manager_.num_pages_of(*adapter.plan)};
        carried = {adapter.plan, "version " + std::to_string(version)};
        source = adapter.source.get();
      }
    }
    const PlannedFailures failures = random_failures();
    program(source, failures, pick(2) == 0);
    const Outcome outcome = outcome_of([&] {
      manager_.add_request_peft(request, task, weights ? &carried : nullptr);
      ASSERT_TRUE(manager_.wait_idle(std::chrono::seconds(60)));
      if (const std::exception_ptr error = manager_.adapter_error(request)) {
        manager_.mark_request_done(request);
        std::rethrow_exception(error);
      }
    });
    program(source, {}, false);
    ASSERT_EQ(outcome, model_.add(request, task, weights, failures));
    if (weights && outcome == Outcome::ok) {
      content_[task] = carried_[task.value][static_cast<std::size_t>(model_.known[task].version)];
    }
  }

  void mark_done(bool pause) {
    const RequestId request{pick(kRequests)};
    manager_.mark_request_done(request, pause);
    model_.mark_done(request, pause);
  }

  void ensure() {
    std::vector<RequestId> batch(pick(6));
    for (RequestId& request : batch) {
      request = RequestId{pick(kRequests)};
    }
    const bool reset = pick(30) == 0;
    const PlannedFailures failures = random_failures();
    program(nullptr, failures, false);
    std::shared_ptr<BatchLease> lease;
    const Outcome outcome = outcome_of([&] { lease = manager_.ensure_batch(batch, reset); });
    program(nullptr, {}, false);
    ASSERT_EQ(outcome, model_.ensure(batch, reset, failures));
    ASSERT_TRUE(lease_ == nullptr || !lease_->is_open()) << "L2: the previous lease is closed";
    lease_ = lease;
    if (lease != nullptr) {
      check_lease(batch);
    }
  }

  void check_lease(const std::vector<RequestId>& batch) {
    ASSERT_EQ(lease_->tasks().size(), model_.lease.size());
    for (std::size_t i = 0; i < model_.lease.size(); ++i) {
      const BatchLease::LeasedTask& leased = lease_->tasks()[i];
      ASSERT_EQ(leased.task, model_.lease[i]) << "L1: in call order";
      ASSERT_TRUE(holds_adapter(leased.pages, *config_, content_.at(leased.task)))
          << "wrong bytes of task " << leased.task.value;
    }
    ASSERT_EQ(lease_->errors().size(), model_.errors.size());
    for (const RequestId request : batch) {
      const bool failed = model_.errors.contains(request);
      ASSERT_EQ(lease_->errors().contains(request), failed);
      const BatchLease::LeasedTask* leased = lease_->find(request);
      ASSERT_EQ(leased == nullptr, failed);
      ASSERT_TRUE(failed || leased->task == model_.requests.at(request).task);
    }
  }

  void close_lease() {
    if (lease_ != nullptr && pick(2) == 0) {
      lease_->close();
    }
    lease_.reset();
    model_.close_lease();
  }

  void compare() {
    ASSERT_EQ(manager_.free_pages(Tier::host), model_.free_host());
    ASSERT_EQ(manager_.free_pages(Tier::device), model_.free_device());
    ASSERT_EQ(manager_.resident_tasks(Tier::host), model_.host.size());
    ASSERT_EQ(manager_.resident_tasks(Tier::device), model_.device.size());
    for (const auto& [task, copy] : model_.host) {
      ASSERT_TRUE(manager_.is_task_cached(task, Tier::host)) << task.value;
    }
    for (const auto& [task, copy] : model_.device) {
      ASSERT_TRUE(manager_.is_task_cached(task, Tier::device)) << task.value;
    }
    compare_owners();
    compare_stats();
  }

  void compare_owners() {
    std::array<std::unordered_map<TaskId, std::set<RequestId>>, 2> expected;
    for (const auto& [request, life] : model_.requests) {
      expected[life.is_paused ? 1 : 0][life.task].insert(request);
    }
    ASSERT_EQ(manager_.active_tasks(), expected[0]);
    ASSERT_EQ(manager_.paused_tasks(), expected[1]);
  }

  void compare_stats() {
    const PeftCacheStats stats = manager_.stats();
    const auto key = [](const PeftCacheStats& s) {
      return std::array{
          s.host.hits,    s.host.misses,   s.host.tasks_evicted,   s.host.pages_evicted,
          s.device.hits,  s.device.misses, s.device.tasks_evicted, s.device.pages_evicted,
          s.source_reads, s.failed_loads};
    };
    ASSERT_EQ(key(stats), key(model_.stats));
  }

  std::mt19937 rng_;
  const std::shared_ptr<const LoraModelConfig> config_ =
      float32_model({{16, 8}, {8, 24}, {12, 12}});
  const std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  PeftCacheManager manager_{config_, options(), device_, eviction_policy_factory("lru")};
  PeftModel model_{kHostPages, kDevicePages};
  std::vector<TaskId> tasks_;  // registered
  std::array<std::array<TestAdapter, 2>, kCarried> carried_;
  std::map<TaskId, TestAdapter> content_;
  std::shared_ptr<BatchLease> lease_;
  int value_ = 0;
};

TEST(PeftMachineTest, AgreesWithAModelThroughRandomUse) {
  for (const std::uint32_t seed : seeds(10)) {
    SCOPED_TRACE(seed_label(seed));
    Machine machine(seed);
    for (int i = 0; i < num_steps(25'000); ++i) {
      machine.step();
      if (::testing::Test::HasFatalFailure()) {
        FAIL() << "at step " << i;
      }
    }
    // The walk came by everything that it is meant to check.
    const PeftCacheStats& stats = machine.model().stats;
    for (const std::uint64_t count :
         {stats.host.hits, stats.host.misses, stats.host.tasks_evicted, stats.device.hits,
          stats.device.misses, stats.device.tasks_evicted, stats.source_reads,
          stats.failed_loads}) {
      EXPECT_GT(count, 0U);
    }
    EXPECT_LT(stats.source_reads, stats.host.misses) << "no refill from the device";
  }
}

}  // namespace
}  // namespace pagedlora
