// A scenario that uses everything, once for each of its events with that event failing (design
// 3.3: C1, C2; 3.4: O1, L1, L6): nothing is lost, nothing leaks, and a retry works.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "pagedlora/peft_cache_manager.h"
#include "peft_faulty_engine.h"

namespace pagedlora {
namespace {

using testing_support::FakeSource;
using testing_support::Fault;
using testing_support::FaultyEngineTest;
using testing_support::Variant;

constexpr Variant kOneBatch{1, 6};
constexpr Variant kTwoBatches{2, 9};
constexpr Variant kOrdinaryMemory{1, 6, true};

class PeftInjectionTest : public FaultyEngineTest {
 protected:
  // The whole scenario. At the end nothing may be left, and the fault must have happened.
  void run(const Variant& variant, const Fault& fault = {}) {
    SCOPED_TRACE("task " + std::to_string(fault.task.value) + ", number " +
                 std::to_string(fault.number));
    start(variant, fault);
    pin(now_.tasks[0]);
    for (std::uint64_t round = 0; round < 3; ++round) {
      now_.first_id = 100 * round;
      const TaskId first = now_.tasks[1 + round % 3];
      const TaskId second = now_.tasks[1 + (round + 1) % 3];
      share_suspend_and_refill(first, second, TaskId{round});
      prefetch_two(second, now_.tasks[1 + (round + 2) % 3]);
      cancel_and_reload(first, second);
    }
    call([&] { manager_->unpin(now_.tasks[0]); });
    EXPECT_EQ(now_.served.size(), 3U * 11);
    expect_nothing_left();
    EXPECT_TRUE(fault.kind == Fault::none || has_fired());
  }
  void run_with_each_fault(Fault::Kind kind, std::atomic<int> FakeSource::* counter) {
    for (const Variant& variant : {kOneBatch, kTwoBatches, kOrdinaryMemory}) {
      run(variant);
      int total = 0;
      for (const auto& [task, adapter] : std::map(adapters_)) {
        const int count = (*adapter.source).*counter;
        for (int number = 0; number < count; ++number) {
          run(variant, {kind, number, task});
        }
        total += count;
      }
      EXPECT_GT(total, 15);
    }
  }

 private:
  // Requests share loads that are under way, one is suspended, one pauses before its load has
  // ended, and carried weights that only the device kept come back to the host.
  void share_suspend_and_refill(TaskId small, TaskId other, TaskId carried) {
    adapters_[carried] = adapter_of(2, kHoleBytes);
    add(1, small);
    add(2, now_.tasks[4]);
    add(3, small);
    batch({1, 3});
    settle();
    add(4, carried);
    batch({2, 4});
    pause(2);
    done({3, 4});
    add(5, other);  // takes the host pages of the carried weights
    pause(5);
    settle();
    done({5});
    add(6, carried);
    settle();
    add(2, now_.tasks[4]);
    batch({2, 6});
    call([&] { manager_->reset_device_cache(); });
    done({1, 2, 6});
  }

  // Into the host tier, then, under what the closed leases left behind, into the device tier. Before
  // those copies can begin, others take the host pages that they read.
  void prefetch_two(TaskId near, TaskId far) {
    const std::vector window{near, far};
    claim([&] { manager_->prefetch(window); });
    settle();
    if (!now_.variant.has_fillers) {
      now_.device->hold_reads();
    }
    while (!now_.leases.empty()) {
      close_oldest_lease();
    }
    claim([&] { manager_->prefetch(window); });
    add(14, now_.tasks[5]);
    add(15, now_.tasks[4]);
    EXPECT_FALSE(on_host(near) || on_host(far));
    now_.device->finish_reads();
    settle();
    done({14, 15});
    add(7, far);
    add(8, near);
    batch({8, 7});  // from the device, while the host is refilled
    settle();
    done({7, 8});
    call([&] { manager_->prefetch({}); });
  }

  // A load that nobody wants is in the way of others; then everything unowned is given up on the
  // host, and what the device kept comes back from there.
  void cancel_and_reload(TaskId first, TaskId second) {
    fake::Gate& gate = source_of(now_.tasks[5]).gate;
    const std::size_t begun = gate.num_begun();
    gate.close();
    add(9, now_.tasks[5]);
    EXPECT_TRUE(comes_true([&] { return gate.num_begun() > begun || has_fired(); }));
    done({9});
    add(10, first);
    add(11, now_.tasks[4]);
    add(12, second);
    gate.open();
    batch({10, 11});
    batch({12});
    settle();
    done({10, 11, 12});
    call([&] { manager_->evict_unowned(Tier::host); });
    add(13, second);
    settle();
    batch({13});
    done({13});
  }
};

TEST_F(PeftInjectionTest, TheScenarioComesByEverything) {
  for (const Variant& variant : {kOneBatch, kTwoBatches}) {
    run(variant);
    const PeftCacheStats& stats = now_.stats;
    for (const std::uint64_t count : {stats.host.hits, stats.host.tasks_evicted, stats.device.hits,
                                      stats.device.tasks_evicted, stats.source_rereads}) {
      EXPECT_GT(count, 0U);
    }
    EXPECT_GT(now_.device->copies_to_host, 0) << "L6";
    EXPECT_EQ(stats.failed_loads, 0U);
  }
}

TEST_F(PeftInjectionTest, C1_WhicheverOpenFailsARetryWorksAndNothingIsLeft) {
  run_with_each_fault(Fault::open, &FakeSource::opens);
}

TEST_F(PeftInjectionTest, C1_WhicheverReadFailsARetryWorksAndNothingIsLeft) {
  run_with_each_fault(Fault::read, &FakeSource::reads);
}

TEST_F(PeftInjectionTest, C1_WhicheverSourceHasChangedARetryWorksAndNothingIsLeft) {
  run_with_each_fault(Fault::finish, &FakeSource::finishes);
}

TEST_F(PeftInjectionTest, L1_WhicheverCopyFailsARetryWorksAndNothingIsLeft) {
  for (const Variant& variant : {kOneBatch, kTwoBatches}) {
    run(variant);
    const int count = now_.device->copies_from_host + now_.device->copies_to_host;
    for (int number = 0; number < count; ++number) {
      run(variant, {Fault::copy, number});
    }
    EXPECT_GT(count, 15);
  }
}

TEST_F(PeftInjectionTest, C2_WhicheverClaimFindsBothTiersFullNothingChangesAndARetryWorks) {
  for (Variant variant : {kOneBatch, kTwoBatches}) {
    variant.has_fillers = true;
    run(variant);
    const std::vector<int> claiming_calls = now_.claiming_calls;
    for (const int number : claiming_calls) {
      run(variant, {Fault::claim, number});
    }
    EXPECT_GT(claiming_calls.size(), 30U);
  }
}

}  // namespace
}  // namespace pagedlora
