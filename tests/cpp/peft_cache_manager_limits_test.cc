// Loads that never end: limits of time, of a load and of a batch, and threads that are stuck (design
// 3.3: C4; 3.4: L1, L8).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::holds;
using testing_support::PeftAsyncTest;
using testing_support::TestAdapter;

TEST_F(PeftAsyncTest, C4_ATimeOutFreesThePagesAtOnceAndTheLateReaderWritesNothing) {
  make_manager(2, 2);
  const TaskId late = register_blocked(2);
  start_to_add(1, late);
  wait_until_read_begins(late);
  manager_->poll();
  EXPECT_EQ(state_of(1), AdapterState::loading) << "its time is not up";
  let_time_pass();
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{1}});
  EXPECT_TRUE(holds<AdapterLoadTimeout>(manager_->adapter_error(RequestId{1})));
  EXPECT_EQ(manager_->free_pages(Tier::host), 2U);
  const TaskId next = register_adapter(2);
  add(2, next);  // in the same pages
  source_of(late).gate.open();
  while (source_of(late).live_readers != 0) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(content_is_right(next, Tier::host));
  done(1);
  done(2);
  add(1, late);  // a retry works
  EXPECT_TRUE(content_is_right(late, Tier::host));
}

TEST_F(PeftAsyncTest, C4_TheLimitCountsFromWhenAWorkerTakesTheLoad) {
  options_.num_put_workers = 1;
  make_manager(8, 8);
  const TaskId first = register_blocked(1);
  const TaskId second = register_blocked(1);
  start_to_add(1, first);
  start_to_add(2, second);
  wait_until_read_begins(first);
  let_time_pass();
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{1}});
  wait_until_read_begins(second);  // by the worker that took the place
  manager_->poll();
  EXPECT_EQ(state_of(2), AdapterState::loading);
  let_time_pass();
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{2}});
}

TEST_F(PeftAsyncTest, L8_SourcesThatBlockForEverHarmOnlyTheirOwnRequests) {
  make_manager(16, 16);
  const std::uint64_t num_blocked = options_.num_put_workers + 1;
  std::vector<TaskId> blocked;
  for (std::uint64_t i = 0; i < num_blocked; ++i) {
    blocked.push_back(register_blocked(1));
    start_to_add(i, blocked.back());
  }
  const TaskId healthy = register_adapter(1);
  start_to_add(9, healthy);
  for (std::uint64_t i = 0; i + 1 < num_blocked; ++i) {
    wait_until_read_begins(blocked[i]);
  }
  let_time_pass();
  EXPECT_EQ(manager_->poll().size(), num_blocked - 1) << "all workers were stuck";
  poll_until_loaded(9);
  EXPECT_TRUE(content_is_right(*ensure({9}), 9));
  wait_until_read_begins(blocked.back());
  let_time_pass();
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{num_blocked - 1}});
  for (std::uint64_t i = 0; i < num_blocked; ++i) {
    EXPECT_TRUE(holds<AdapterLoadTimeout>(manager_->adapter_error(RequestId{i})));
  }
  manager_->check_invariants();
  manager_->close();  // returns, though the readers are still out
  manager_.reset();
}

TEST_F(PeftAsyncTest, C4_BeyondSixteenAbandonedReadersLoadsFailAtOnce) {
  options_.num_put_workers = 1;
  make_manager(32, 32);
  constexpr std::uint64_t kMostBlocked = 16 + 1;  // abandoned ones, and the last worker
  for (std::uint64_t i = 0; i < kMostBlocked; ++i) {
    const TaskId task = register_blocked(1);
    start_to_add(i, task);
    wait_until_read_begins(task);
    let_time_pass();
    EXPECT_EQ(manager_->poll(), std::vector{RequestId{i}});
  }
  const TaskId healthy = register_adapter(1);
  start_to_add(99, healthy);
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{99}}) << "without any time";
  EXPECT_TRUE(holds<AdapterLoadTimeout>(manager_->adapter_error(RequestId{99})));
  EXPECT_EQ(source_of(healthy).opens, 0);
  done(99);
  for (const TestAdapter& adapter : blocked_) {
    adapter.source->gate.open();
  }
  while (state_of(99) != AdapterState::ready) {  // once the storage answers again
    done(99);
    start_to_add(99, healthy);
    manager_->poll();
    std::this_thread::yield();
  }
}

TEST_F(PeftAsyncTest, L1_ABatchGivesUpACopyThatNeverEndsAndKeepsTheOthers) {
  make_manager(8, 8);
  const TaskId stuck = register_adapter(2);
  const TaskId fine = register_adapter(2);
  add(1, stuck);
  add(2, fine);
  device_->copies.close();
  std::thread helper([&] {
    device_->copies.wait_for_begun(2);
    device_->copies.let_pass(1);
    while (device_->copied_bytes == 0) {
      std::this_thread::yield();
    }
    let_time_pass();
  });
  const auto lease = ensure({1, 2});
  helper.join();
  EXPECT_EQ(lease->errors().size(), 1U);
  for (const auto& [request, error] : lease->errors()) {
    EXPECT_TRUE(holds<AdapterLoadTimeout>(error));
  }
  const std::uint64_t leased = lease->requests().front().request.value;
  EXPECT_TRUE(content_is_right(*lease, leased));
  EXPECT_EQ(manager_->resident_tasks(Tier::device), 1U);
  EXPECT_EQ(state_of(3 - leased), AdapterState::ready) << "its host copy is there";
}

TEST_F(PeftAsyncTest, L1_ABatchWaitsNoLongerThanTheLimitForALoadBehindOthers) {
  options_.num_put_workers = 1;
  make_manager(8, 8);
  const TaskId blocking = register_blocked(1);
  const TaskId queued = register_adapter(1);
  start_to_add(1, blocking);
  wait_until_read_begins(blocking);
  clock_->advance(kLimit / 2);
  start_to_add(2, queued);
  std::thread helper([&] {
    while (manager_->free_pages(Tier::device) == 8) {
      std::this_thread::yield();
    }
    source_of(queued).gate.close();
    let_time_pass();
  });
  blocked_.push_back(adapters_.at(queued));
  const auto lease = ensure({2});
  helper.join();
  // Either its own load was begun and is late, or it still waits for a worker.
  ASSERT_EQ(lease->errors().size() + lease->tasks().size(), 1U);
  EXPECT_EQ(manager_->free_pages(Tier::device), lease->tasks().empty() ? 8U : 7U);
}

TEST_F(PeftAsyncTest, WaitIdleReturnsAfterItsTime) {
  options_.load_timeout = std::chrono::hours(1);
  make_manager(8, 8);
  const TaskId blocked = register_blocked(2);
  start_to_add(1, blocked);
  std::atomic<bool> returned{false};
  std::thread helper([&] {
    while (!returned) {
      clock_->advance(std::chrono::milliseconds(100));
      std::this_thread::yield();
    }
  });
  EXPECT_FALSE(manager_->wait_idle(std::chrono::seconds(1)));
  returned = true;
  helper.join();
  source_of(blocked).gate.open();
  EXPECT_TRUE(manager_->wait_idle(kPatience));
}

}  // namespace
}  // namespace pagedlora
