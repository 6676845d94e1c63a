// The ownership table of design 3.4, leases, victims and counters, without failures.
#include "pagedlora/peft_cache_manager.h"

#include <gtest/gtest.h>

#include "pagedlora/errors.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::holds;
using testing_support::PeftTest;
using testing_support::thrown_by;
using Owners = std::unordered_map<TaskId, std::set<RequestId>>;

class PeftOwnershipTest : public PeftTest {
 protected:
  void SetUp() override {
    make_manager(8, 8);
    task_ = register_adapter(2);
  }

  // Whether somebody's ownership keeps the host copy.
  bool is_host_pinned() {
    manager_->evict_unowned(Tier::host);
    return on_host(task_);
  }
  Owners active() const { return manager_->active_tasks(); }
  Owners paused() const { return manager_->paused_tasks(); }

  TaskId task_;
};

TEST_F(PeftOwnershipTest, RegisteringReadsNothingAndOwnsNothing) {
  EXPECT_EQ(source_of(task_).opens, 0);
  EXPECT_FALSE(on_host(task_));
  EXPECT_TRUE(manager_->is_task_done(task_));
  EXPECT_EQ(manager_->num_pages_of(task_), 2U);
}

TEST_F(PeftOwnershipTest, AddMakesTheRequestActiveAndTheHostCopyResidentAndPinned) {
  add(1, task_);
  EXPECT_EQ(active(), (Owners{{task_, {RequestId{1}}}}));
  EXPECT_EQ(paused(), Owners{});
  EXPECT_TRUE(on_host(task_));
  EXPECT_FALSE(on_device(task_));
  EXPECT_TRUE(content_is_right(task_, Tier::host));
  EXPECT_TRUE(is_host_pinned());
  EXPECT_FALSE(manager_->is_task_done(task_));
  EXPECT_FALSE(manager_->is_task_done_device(task_));
  EXPECT_EQ(manager_->task_of(RequestId{1}), task_);
}

TEST_F(PeftOwnershipTest, PauseMovesTheRequestAndKeepsTheHostPin) {
  add(1, task_);
  pause(1);
  EXPECT_EQ(active(), Owners{});
  EXPECT_EQ(paused(), (Owners{{task_, {RequestId{1}}}}));
  EXPECT_TRUE(is_host_pinned());
  EXPECT_FALSE(manager_->is_task_done(task_));
  EXPECT_TRUE(manager_->is_task_done_device(task_));
}

TEST_F(PeftOwnershipTest, AddOfAPausedRequestResumesIt) {
  add(1, task_);
  pause(1);
  add(1, task_);
  EXPECT_EQ(active(), (Owners{{task_, {RequestId{1}}}}));
  EXPECT_EQ(paused(), Owners{});
  done(1);
  EXPECT_FALSE(is_host_pinned());
}

TEST_F(PeftOwnershipTest, DoneOfTheLastOwnerUnpinsTheHostCopy) {
  add(1, task_);
  add(2, task_);
  pause(2);
  done(1);
  EXPECT_TRUE(is_host_pinned());
  done(2);
  EXPECT_TRUE(on_host(task_));  // evictable, not evicted
  EXPECT_FALSE(is_host_pinned());
  EXPECT_EQ(active(), Owners{});
  EXPECT_EQ(paused(), Owners{});
}

TEST_F(PeftOwnershipTest, O1_EverythingIsIdempotent) {
  add(1, task_);
  add(1, task_);
  pause(1);
  pause(1);
  EXPECT_EQ(paused(), (Owners{{task_, {RequestId{1}}}}));
  done(1);
  done(1);
  pause(1);
  EXPECT_EQ(manager_->task_of(RequestId{1}), std::nullopt);
  EXPECT_FALSE(is_host_pinned());
  EXPECT_EQ(source_of(task_).opens, 1);
}

TEST_F(PeftOwnershipTest, O1_UnknownRequestsLeaveNoPhantomEntries) {
  done(9);
  pause(9);
  EXPECT_EQ(active(), Owners{});
  EXPECT_EQ(paused(), Owners{});
  EXPECT_EQ(manager_->resident_tasks(Tier::host), 0U);
}

TEST_F(PeftOwnershipTest, O1_ALiveRequestCannotChangeItsTask) {
  const TaskId other = register_adapter(1);
  add(1, task_);
  EXPECT_THROW(add(1, other), RequestConflictError);
  EXPECT_EQ(manager_->task_of(RequestId{1}), task_);
  EXPECT_EQ(source_of(other).opens, 0);
  EXPECT_FALSE(on_host(other));
}

TEST_F(PeftOwnershipTest, O2_AnEvictedAndReadTaskIsPinnedAtOnce) {
  add(1, task_);
  done(1);
  manager_->evict_unowned(Tier::host);
  ASSERT_FALSE(on_host(task_));
  add(2, task_);
  EXPECT_TRUE(is_host_pinned());
  EXPECT_EQ(source_of(task_).opens, 2);
  EXPECT_EQ(manager_->stats().source_rereads, 1U);
}

TEST_F(PeftOwnershipTest, RegisteredIdsStartAboveThoseThatCallersChoose) {
  EXPECT_EQ(task_.value, PeftCacheManager::kFirstRegisteredTask);
  EXPECT_EQ(register_adapter(1).value, PeftCacheManager::kFirstRegisteredTask + 1);
}

class PeftLeaseTest : public PeftTest {};

TEST_F(PeftLeaseTest, L1_LeasesEveryRequestWithItsTasksPages) {
  make_manager(8, 8);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(1);
  add(1, first);
  add(2, second);
  add(3, first);
  const auto lease = ensure({1, 2, 3, 1});
  EXPECT_TRUE(lease->errors().empty());
  EXPECT_EQ(lease->tasks().size(), 2U);
  EXPECT_EQ(lease->find(RequestId{1}), lease->find(RequestId{3}));
  EXPECT_EQ(lease->find(RequestId{2})->task, second);
  for (const std::uint64_t request : {1U, 2U, 3U}) {
    EXPECT_TRUE(content_is_right(*lease, request));
  }
  EXPECT_EQ(lease->find(RequestId{4}), nullptr);
  EXPECT_EQ(device_->copies_from_host, 2);
}

TEST_F(PeftLeaseTest, CopiesOfNeighbouringPagesAreOneRun) {
  make_manager(8, 8);
  add(1, register_adapter(5));
  ensure({1});
  EXPECT_EQ(device_->runs, 1);
  EXPECT_EQ(device_->copied_bytes, 5 * kPageBytes);
}

TEST_F(PeftLeaseTest, L1_RequestsThatAreNotActiveGetTheirOwnError) {
  make_manager(8, 8);
  const TaskId task = register_adapter(1);
  add(1, task);
  add(2, task);
  pause(2);
  const auto lease = ensure({9, 1, 2});
  EXPECT_TRUE(content_is_right(*lease, 1));
  ASSERT_EQ(lease->errors().size(), 2U);
  EXPECT_TRUE(holds<InvalidArgumentError>(lease->errors().at(RequestId{9})));
  EXPECT_TRUE(holds<InvalidArgumentError>(lease->errors().at(RequestId{2})));
  EXPECT_EQ(lease->find(RequestId{2}), nullptr);
}

TEST_F(PeftLeaseTest, AnEmptyBatchHasAnEmptyLease) {
  make_manager(4, 4);
  const auto lease = ensure({});
  EXPECT_TRUE(lease->tasks().empty());
  EXPECT_TRUE(lease->errors().empty());
}

TEST_F(PeftLeaseTest, L3_WhatAnOpenLeaseReadsIsNotEvicted) {
  make_manager(8, 8);
  const TaskId task = register_adapter(1);
  add(1, task);
  const auto lease = ensure({1});
  done(1);
  manager_->evict_unowned(Tier::device);
  manager_->evict_unowned(Tier::host);
  EXPECT_TRUE(on_device(task));
  EXPECT_TRUE(content_is_right(*lease, 1));
  lease->close();
  manager_->evict_unowned(Tier::device);
  EXPECT_FALSE(on_device(task));
}

TEST_F(PeftLeaseTest, L2_TheNextBatchClosesThePreviousLease) {
  make_manager(8, 2);
  const TaskId first = register_adapter(2);
  add(1, first);
  add(2, register_adapter(2));
  const auto lease = ensure({1});
  const auto next = ensure({2});
  EXPECT_FALSE(lease->is_open());
  EXPECT_THROW(lease->find(RequestId{1}), LeaseClosedError);
  EXPECT_FALSE(on_device(first));
  EXPECT_TRUE(content_is_right(*next, 2));
  lease->close();  // idempotent, and not the next one's
  EXPECT_TRUE(next->is_open());
}

TEST_F(PeftLeaseTest, ADroppedLeaseIsClosed) {
  make_manager(8, 8);
  const TaskId task = register_adapter(1);
  add(1, task);
  ensure({1});  // dropped at once
  done(1);
  manager_->evict_unowned(Tier::device);
  EXPECT_FALSE(on_device(task));
}

TEST_F(PeftLeaseTest, ALeaseMayOutliveItsManager) {
  make_manager(8, 8);
  add(1, register_adapter(1));
  const auto lease = ensure({1});
  manager_.reset();
  EXPECT_FALSE(lease->is_open());
  EXPECT_THROW(lease->find(RequestId{1}), LeaseClosedError);
  EXPECT_EQ(lease->config().modules().size(), 1U);
  lease->close();
}

class PeftVictimTest : public PeftTest {};

TEST_F(PeftVictimTest, L3_DeviceCopiesGoUnownedThenPausedThenActive) {
  make_manager(16, 4);
  std::vector<TaskId> tasks;
  for (std::uint64_t i = 0; i < 4; ++i) {
    tasks.push_back(register_adapter(1));
    add(i, tasks[i]);
  }
  ensure_and_close({0, 1, 2, 3});
  pause(1);
  done(3);  // classes: active, paused, active, unowned
  const auto bring_in = [&](std::uint64_t request) {
    add(request, register_adapter(1));
    ensure_and_close({request});
  };
  bring_in(10);
  EXPECT_FALSE(on_device(tasks[3]));
  bring_in(11);
  EXPECT_FALSE(on_device(tasks[1]));
  EXPECT_TRUE(on_device(tasks[0]));
  bring_in(12);
  EXPECT_FALSE(on_device(tasks[0]));  // then by recency
  EXPECT_TRUE(on_device(tasks[2]));
}

TEST_F(PeftVictimTest, L3_ATaskTakesTheClassOfItsLeastEvictableOwner) {
  make_manager(16, 2);
  const TaskId shared = register_adapter(1);
  const TaskId other = register_adapter(1);
  add(1, shared);
  add(2, shared);
  add(3, other);
  ensure_and_close({1, 2, 3});
  pause(1);  // request 2 is still active
  pause(3);
  add(4, register_adapter(1));
  ensure_and_close({4});
  EXPECT_TRUE(on_device(shared));
  EXPECT_FALSE(on_device(other));
}

TEST_F(PeftVictimTest, HostVictimsAreTheLeastRecentlyAdded) {
  make_manager(3, 8);
  const TaskId first = register_adapter(1);
  const TaskId second = register_adapter(1);
  const TaskId third = register_adapter(1);
  add(1, first);
  add(2, second);
  add(3, third);
  add(4, first);
  done(4);
  done(1);
  done(
      2);  // ending a request is no use: second was added before first was again; third has an owner
  add(5, register_adapter(1));
  EXPECT_FALSE(on_host(second));
  EXPECT_TRUE(on_host(first));
  add(6, register_adapter(1));
  EXPECT_FALSE(on_host(first));
  EXPECT_TRUE(on_host(third));
}

TEST_F(PeftVictimTest, AResetMakesCopiesUnownedUntilTheyAreUsedAgain) {
  make_manager(16, 3);
  const TaskId first = register_adapter(1);
  const TaskId second = register_adapter(1);
  const TaskId idle = register_adapter(1);
  add(1, first);
  add(2, second);
  add(3, idle);
  ensure_and_close({1, 2, 3});
  done(3);
  manager_->reset_device_cache();
  ensure_and_close({1});  // used again
  add(4, register_adapter(2));
  ensure_and_close({4});
  EXPECT_TRUE(on_device(first));
  EXPECT_FALSE(on_device(second));
  EXPECT_FALSE(on_device(idle));
}

TEST_F(PeftVictimTest, L6_AHostCopyIsRefilledFromTheDeviceWithoutReadingTheSource) {
  make_manager(2, 8);
  const TaskId task = register_adapter(2);
  add(1, task);
  ensure_and_close({1});
  done(1);
  add(2, register_adapter(2));  // takes the host pages
  ASSERT_FALSE(on_host(task));
  ASSERT_TRUE(on_device(task));
  done(2);
  add(3, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_EQ(source_of(task).opens, 1);
  EXPECT_EQ(device_->copies_to_host, 1);
  EXPECT_EQ(manager_->stats().source_reads, 2U);
}

TEST_F(PeftTest, EachEventIsCountedOnce) {
  make_manager(4, 2);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(2);
  add(1, first);
  add(2, first);  // hit
  add(2, first);  // an owner already: nothing happens
  ensure_and_close({1, 2});
  ensure_and_close({1});  // hit
  add(3, second);
  ensure_and_close({3});  // evicts the first from the device
  done(1);
  done(2);
  add(4, register_adapter(1));  // evicts the first from the host
  const PeftCacheStats stats = manager_->stats();
  EXPECT_EQ(stats.host.hits, 1U);
  EXPECT_EQ(stats.host.misses, 3U);
  EXPECT_EQ(stats.host.tasks_evicted, 1U);
  EXPECT_EQ(stats.host.pages_evicted, 2U);
  EXPECT_EQ(stats.host.tasks_loaded, 3U);
  EXPECT_EQ(stats.host.bytes_loaded, 5 * kPageBytes);
  EXPECT_EQ(stats.device.hits, 1U);
  EXPECT_EQ(stats.device.misses, 2U);
  EXPECT_EQ(stats.device.tasks_evicted, 1U);
  EXPECT_EQ(stats.device.pages_evicted, 2U);
  EXPECT_EQ(stats.device.tasks_loaded, 2U);
  EXPECT_EQ(stats.device.bytes_loaded, 4 * kPageBytes);
  EXPECT_EQ(stats.source_reads, 3U);
  EXPECT_EQ(stats.source_rereads, 0U);
  EXPECT_EQ(stats.source_bytes, 5 * kPageBytes);
  EXPECT_EQ(stats.failed_loads, 0U);
}

TEST_F(PeftTest, PageCountsRoundDownToTheBudgets) {
  const PeftCacheOptions options{.host_cache_bytes = 5 * kPageBytes - 1,
                                 .device_cache_bytes = 3 * kPageBytes + 511,
                                 .page_bytes = kPageBytes};
  manager_ =
      std::make_unique<PeftCacheManager>(config_, options, device_, eviction_policy_factory("lru"));
  EXPECT_EQ(manager_->max_pages(Tier::host), 4U);
  EXPECT_EQ(manager_->max_pages(Tier::device), 3U);
  EXPECT_EQ(manager_->pool_range(Tier::device).second, 3 * kPageBytes);
  EXPECT_EQ(manager_->free_pages(Tier::device), 3U);
}

TEST_F(PeftTest, AClosedManagerTakesNoMoreRequests) {
  make_manager(4, 4);
  const TaskId task = register_adapter(1);
  add(1, task);
  const auto lease = ensure({1});
  manager_->close();
  manager_->close();
  EXPECT_FALSE(lease->is_open());
  EXPECT_THROW(add(2, task), InvalidArgumentError);
  EXPECT_THROW(ensure({1}), InvalidArgumentError);
  EXPECT_THROW(register_adapter(1), InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
