// What does not fit, and what fails on the way: nothing is left behind and a retry works
// (design 3.4: O1, O3, L1; 3.3: C1, C2).
#include <gtest/gtest.h>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::CopyFailure;
using testing_support::holds;
using testing_support::PeftTest;
using testing_support::TestAdapter;
using testing_support::thrown_by;

class PeftCapacityTest : public PeftTest {};

TEST_F(PeftCapacityTest, O3_AFullHostTierSaysItsNumbersAndChangesNothing) {
  make_manager(5, 8);
  const TaskId owned = register_adapter(3);
  const TaskId idle = register_adapter(1);
  add(1, owned);
  add(2, idle);
  done(2);
  const TaskId task = register_adapter(3);
  const auto error = thrown_by<LoraCacheFullError>([&] { add(3, task); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->tier, "host");
  EXPECT_EQ(error->needed_pages, 3U);
  EXPECT_EQ(error->free_pages, 1U);
  EXPECT_EQ(error->evictable_pages, 1U);
  EXPECT_TRUE(on_host(idle));
  EXPECT_EQ(manager_->task_of(RequestId{3}), std::nullopt);
  EXPECT_TRUE(manager_->is_task_done(task));
  const PeftCacheStats stats = manager_->stats();
  EXPECT_EQ(stats.host.misses, 2U);  // the refused one is counted when it is brought in
  EXPECT_EQ(stats.host.tasks_evicted, 0U);
  EXPECT_EQ(stats.failed_loads, 0U);
  EXPECT_EQ(source_of(task).live_readers, 0);
  done(1);
  EXPECT_NO_THROW(add(3, task));
  EXPECT_TRUE(content_is_right(task, Tier::host));
}

TEST_F(PeftCapacityTest, C2_ABatchWhoseSumDoesNotFitLeavesTheDeviceAsItIs) {
  make_manager(16, 5);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(2);
  add(1, first);
  add(2, second);
  add(3, register_adapter(2));
  add(4, register_adapter(2));
  ensure_and_close({1, 2});
  // Request 1 keeps its copy; 4 pages are needed, 1 is free and 2 of request 2 are evictable.
  const auto error = thrown_by<LoraCacheFullError>([&] { ensure({3, 1, 4}); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->tier, "device");
  EXPECT_EQ(error->needed_pages, 4U);
  EXPECT_EQ(error->free_pages, 1U);
  EXPECT_EQ(error->evictable_pages, 2U);
  EXPECT_TRUE(content_is_right(first, Tier::device));
  EXPECT_TRUE(content_is_right(second, Tier::device));
  EXPECT_EQ(manager_->resident_tasks(Tier::device), 2U);
  const PeftCacheStats stats = manager_->stats();
  EXPECT_EQ(stats.device.tasks_evicted, 0U);
  EXPECT_EQ(stats.device.misses, 2U);
  EXPECT_EQ(stats.device.hits, 0U);
  const auto lease = ensure({3, 1});
  EXPECT_TRUE(content_is_right(*lease, 3));
  EXPECT_TRUE(content_is_right(*lease, 1));
}

TEST_F(PeftCapacityTest, O3_AnAdapterThatCanNeverFitIsTooLargeWhateverIsEvicted) {
  const auto too_large = [&](std::size_t host_pages, std::size_t device_pages) {
    make_manager(host_pages, device_pages);
    add(1, register_adapter(3));
    const TaskId task = register_adapter(5);
    const auto error = thrown_by<AdapterTooLargeError>([&] { add(2, task); });
    EXPECT_TRUE(error.has_value());
    EXPECT_EQ(source_of(task).opens, 0);
    EXPECT_EQ(manager_->resident_tasks(Tier::host), 1U);
    EXPECT_EQ(manager_->task_of(RequestId{2}), std::nullopt);
    EXPECT_EQ(error ? error->needed_pages : 0, 5U);
    EXPECT_EQ(error ? error->total_pages : 0, 4U);
    EXPECT_EQ(error ? error->page_bytes : 0, kPageBytes);
    const std::string way_out = "_cache_size to " + std::to_string(5 * kPageBytes) + " bytes";
    EXPECT_NE(std::string(error ? error->what() : "").find(way_out), std::string::npos);
    return error ? error->tier : "";
  };
  EXPECT_EQ(too_large(4, 8), "host");
  EXPECT_EQ(too_large(8, 4), "device");
  make_manager(5, 5);
  EXPECT_NO_THROW(add(1, register_adapter(5)));
}

TEST_F(PeftCapacityTest, ADeviceWithoutRoomAndBudgetsWithoutPagesAreRefused) {
  EXPECT_THROW(make_manager(0, 4), InvalidArgumentError);
  EXPECT_THROW(make_manager(4, 0), InvalidArgumentError);
  device_->refuse_allocations = true;
  const auto error = thrown_by<OutOfMemoryError>([&] { make_manager(4, 4); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->tier, "device");
}

class PeftSourceFailureTest : public PeftTest {
 protected:
  void SetUp() override { make_manager(4, 4); }

  // After a failed add: as if it had never been called.
  void expect_nothing_left(TaskId task, std::uint64_t request, std::uint64_t failures) {
    EXPECT_FALSE(on_host(task));
    EXPECT_EQ(manager_->free_pages(Tier::host), 4U);
    EXPECT_EQ(manager_->task_of(RequestId{request}), std::nullopt);
    EXPECT_TRUE(manager_->active_tasks().empty());
    const PeftCacheStats stats = manager_->stats();
    EXPECT_EQ(stats.failed_loads, failures);
    EXPECT_EQ(stats.source_reads, 0U);
    EXPECT_EQ(stats.host.bytes_loaded, 0U);
    EXPECT_NO_THROW(manager_->check_invariants());
  }

  static constexpr std::size_t kHole = 10'000;  // one read per matrix
};

TEST_F(PeftSourceFailureTest, C1_EveryFailureOfARegisteredSourceLeavesNothingAndARetryWorks) {
  const TaskId task = register_adapter(2, kHole);
  const auto& source = source_of(task);
  source.fail_open = true;
  EXPECT_THROW(add(1, task), AdapterNotFoundError);
  expect_nothing_left(task, 1, 1);
  constexpr int kReads = 2;
  for (int n = 0; n < kReads; ++n) {
    source.fail_read_after = n;
    EXPECT_THROW(add(1, task), AdapterReadError) << "read " << n;
    expect_nothing_left(task, 1, static_cast<std::uint64_t>(n) + 2);
  }
  source.fail_finish = true;
  EXPECT_THROW(add(1, task), AdapterSourceChangedError);
  expect_nothing_left(task, 1, 4);
  EXPECT_EQ(source.live_readers, 0);

  const int reads_before = source.reads;
  add(1, task);
  EXPECT_EQ(source.reads - reads_before, kReads) << "the loop above must cover every read";
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_EQ(manager_->stats().source_rereads, 0U);
}

TEST_F(PeftSourceFailureTest, C1_EveryFailureOfCarriedWeightsForgetsTheTask) {
  const TestAdapter adapter = adapter_of(2, kHole);
  const auto& source = *adapter.source;
  const auto expect_failure = [&](std::uint64_t failures) {
    EXPECT_ANY_THROW(add(1, 7, adapter, "digest"));
    expect_nothing_left(TaskId{7}, 1, failures);
    EXPECT_THROW(add(1, TaskId{7}), PeftTaskNotCachedError);
    EXPECT_THROW(manager_->num_pages_of(TaskId{7}), PeftTaskNotCachedError);
  };
  source.fail_open = true;
  expect_failure(1);
  source.fail_read_after = 0;
  expect_failure(2);
  source.fail_read_after = 1;
  expect_failure(3);
  source.fail_finish = true;
  expect_failure(4);
  add(1, 7, adapter, "digest");
  EXPECT_TRUE(content_is_right(TaskId{7}, Tier::host));
}

TEST_F(PeftSourceFailureTest, O1_AFailedAddLeavesOtherOwnersAlone) {
  const TaskId owned = register_adapter(1);
  add(1, owned);
  const TaskId task = register_adapter(2);
  source_of(task).fail_read_after = 0;
  EXPECT_THROW(add(2, task), AdapterReadError);
  EXPECT_TRUE(content_is_right(owned, Tier::host));
  EXPECT_EQ(manager_->active_tasks().size(), 1U);
}

TEST_F(PeftSourceFailureTest, C3_VictimsAreChosenByTheCallWhateverTheSourceDoes) {
  const TaskId idle = register_adapter(4);
  add(1, idle);
  done(1);
  const TaskId task = register_adapter(1);
  source_of(task).fail_open = true;
  EXPECT_THROW(add(2, task), AdapterNotFoundError);
  EXPECT_FALSE(on_host(idle));
}

class PeftDeviceFailureTest : public PeftTest {
 protected:
  // A task of two pages that nobody owns and whose host copy was given up.
  TaskId leave_on_device_only() {
    make_manager(2, 4);
    const TaskId task = register_adapter(2);
    add(1, task);
    ensure_and_close({1});
    done(1);
    manager_->evict_unowned(Tier::host);
    return task;
  }
};

TEST_F(PeftDeviceFailureTest, L1_AFailedCopyIsTheErrorOfItsRequestsOnly) {
  constexpr int kTasks = 3;
  options_.num_ensure_workers = 1;  // so that the n-th copy is that of the n-th task
  for (int n = 0; n < kTasks; ++n) {
    make_manager(16, 16);
    for (std::uint64_t i = 0; i < kTasks; ++i) {
      const TaskId task = register_adapter(2);
      add(i, task);
      add(i + 10, task);
    }
    device_->fail_copy_after = n;
    const auto failed = static_cast<std::uint64_t>(n);
    const auto lease = ensure({0, 1, 2, 10, 11, 12});
    EXPECT_EQ(lease->errors().size(), 2U);
    EXPECT_EQ(lease->tasks().size(), 2U);
    for (std::uint64_t i = 0; i < kTasks; ++i) {
      for (const std::uint64_t request : {i, i + 10}) {
        if (i == failed) {
          EXPECT_TRUE(holds<CopyFailure>(lease->errors().at(RequestId{request})));
          EXPECT_EQ(lease->find(RequestId{request}), nullptr);
        } else {
          EXPECT_TRUE(content_is_right(*lease, request));
        }
      }
    }
    EXPECT_EQ(manager_->free_pages(Tier::device), 16U - 4);
    EXPECT_EQ(manager_->stats().failed_loads, 1U);
    EXPECT_NO_THROW(manager_->check_invariants());
    EXPECT_TRUE(content_is_right(*ensure({failed}), failed)) << "a retry works";
    EXPECT_NO_THROW(manager_->check_invariants());
  }
}

TEST_F(PeftDeviceFailureTest, ABatchWhoseCopiesAllFailLeavesTheDeviceEmpty) {
  make_manager(8, 8);
  add(1, register_adapter(2));
  device_->fail_copy_after = 0;
  const auto lease = ensure({1});
  EXPECT_EQ(lease->errors().size(), 1U);
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
}

TEST_F(PeftDeviceFailureTest, L6_ARefillThatFailsIsReadFromTheSourceInstead) {
  const TaskId task = leave_on_device_only();
  device_->fail_copy_after = 0;
  add(2, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_TRUE(content_is_right(task, Tier::device));
  EXPECT_EQ(source_of(task).opens, 2);
  EXPECT_EQ(manager_->stats().failed_loads, 1U);
  EXPECT_NO_THROW(manager_->check_invariants());
}

TEST_F(PeftDeviceFailureTest, L6_ARefillThatFailsIsTheErrorOfItsOwnersIfTheSourceFailsToo) {
  const TaskId task = leave_on_device_only();
  device_->fail_copy_after = 0;
  source_of(task).fail_open = true;
  EXPECT_THROW(add(2, task), AdapterNotFoundError);
  EXPECT_EQ(manager_->task_of(RequestId{2}), std::nullopt);
  EXPECT_EQ(manager_->free_pages(Tier::host), 2U);
  EXPECT_TRUE(content_is_right(task, Tier::device));
  EXPECT_EQ(manager_->stats().failed_loads, 2U);
  EXPECT_NO_THROW(manager_->check_invariants());
  add(2, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_EQ(source_of(task).opens, 1) << "from the device";
}

}  // namespace
}  // namespace pagedlora
