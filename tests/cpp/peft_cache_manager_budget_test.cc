// Who may keep host pages: started requests, user pins, those that wait (design 3.4: O2, O3, O4), and
// what the iteration statistics count.
#include <gtest/gtest.h>

#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::PeftTest;
using testing_support::thrown_by;

class PeftBudgetTest : public PeftTest {};

TEST_F(PeftBudgetTest, O4_AStartedRequestTakesThePlaceOfTheLatestThatHaveNot) {
  make_manager(6, 6);
  std::vector<TaskId> tasks;
  for (std::uint64_t i = 0; i < 3; ++i) {
    tasks.push_back(register_adapter(2));
    add(i, tasks[i]);
  }
  add(9, tasks[1]);  // a later owner of an earlier task
  const TaskId resumed = register_adapter(3);
  EXPECT_THROW(start_to_add(5, resumed), LoraCacheFullError) << "it has not started";
  start_to_add(5, resumed, /*started=*/true);
  settle(5);
  EXPECT_TRUE(content_is_right(resumed, Tier::host));
  EXPECT_EQ(state_of(0), AdapterState::ready) << "the first to come is the last to go";
  for (const std::uint64_t request : {1U, 2U, 9U}) {
    EXPECT_EQ(state_of(request), AdapterState::waiting);
    EXPECT_THROW(start_to_add(request, tasks[request == 2 ? 2 : 1]), LoraCacheFullError);
  }
  done(5);
  add(1, tasks[1]);
  EXPECT_EQ(state_of(1), AdapterState::ready);
}

TEST_F(PeftBudgetTest, O4_WhatIsStartedPausedOrPinnedIsNeverTaken) {
  make_manager(6, 6);
  std::vector<TaskId> tasks;
  for (std::uint64_t i = 0; i < 2; ++i) {
    tasks.push_back(register_adapter(2));
    add(i, tasks[i]);
  }
  ensure_and_close({0});  // started
  pause(1);
  add(3, tasks[1]);  // shares a paused task
  const TaskId waiting = register_adapter(1);
  add(2, waiting);
  const TaskId large = register_adapter(3);
  const auto error = thrown_by<LoraCacheFullError>([&] { start_to_add(5, large, true); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->needed_pages, 3U);
  EXPECT_EQ(error->free_pages, 1U);
  EXPECT_EQ(error->evictable_pages, 1U) << "the only one that waits";
  EXPECT_EQ(state_of(2), AdapterState::ready) << "nothing was taken in vain";
  start_to_add(5, register_adapter(2), true);
  EXPECT_EQ(state_of(2), AdapterState::waiting);
}

TEST_F(PeftBudgetTest, O4_TwoPausedTasksThatFillTheHostTierAndAThirdAllFinish) {
  make_manager(4, 4);
  std::vector<TaskId> tasks;
  for (std::uint64_t i = 0; i < 3; ++i) {
    tasks.push_back(register_adapter(2));
  }
  add(0, tasks[0]);
  add(1, tasks[1]);
  ensure_and_close({0, 1});
  pause(0);
  pause(1);
  EXPECT_THROW(start_to_add(2, tasks[2]), LoraCacheFullError);
  for (const std::uint64_t request : {0U, 1U}) {
    add(request, tasks[request]);  // a paused one can always go on
    EXPECT_TRUE(content_is_right(*ensure({request}), request));
    done(request);
  }
  add(2, tasks[2]);
  EXPECT_TRUE(content_is_right(*ensure({2}), 2));
}

TEST_F(PeftBudgetTest, O2_AUserPinKeepsTheHostCopyOnly) {
  make_manager(6, 6);
  const TaskId pinned = register_adapter(2);
  manager_->pin(pinned);
  manager_->pin(pinned);
  manager_->wait_idle(kPatience);
  EXPECT_TRUE(content_is_right(pinned, Tier::host));
  add(1, pinned);
  ensure_and_close({1});
  done(1);
  manager_->evict_unowned(Tier::device);
  EXPECT_FALSE(on_device(pinned));
  manager_->evict_unowned(Tier::host);
  EXPECT_TRUE(on_host(pinned));
  manager_->unpin(pinned);
  manager_->evict_unowned(Tier::host);
  EXPECT_TRUE(on_host(pinned));
  manager_->unpin(pinned);
  manager_->evict_unowned(Tier::host);
  EXPECT_FALSE(on_host(pinned));
  EXPECT_THROW(manager_->unpin(pinned), InvalidArgumentError);
  EXPECT_THROW(manager_->pin(TaskId{5}), PeftTaskNotCachedError);
}

TEST_F(PeftBudgetTest, O2_PinsLeaveRoomForTheLargestKnownAdapter) {
  make_manager(8, 8);
  const TaskId large = register_adapter(4);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(2);
  const TaskId third = register_adapter(1);
  manager_->pin(first);
  manager_->pin(second);
  EXPECT_THROW(manager_->pin(third), LoraCacheFullError);
  EXPECT_FALSE(manager_->is_task_cached(third, Tier::host));
  manager_->wait_idle(kPatience);
  add(1, large);  // there is room for it
  EXPECT_TRUE(content_is_right(large, Tier::host));
}

TEST_F(PeftBudgetTest, O3_WhatCanNeverFitBesideThePinsIsTooLarge) {
  make_manager(8, 8);
  const TaskId pinned = register_adapter(3);
  manager_->pin(pinned);
  const TaskId large = register_adapter(6);
  const auto error = thrown_by<AdapterTooLargeError>([&] { start_to_add(1, large); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->needed_pages, 6U);
  EXPECT_EQ(error->total_pages, 5U);
  manager_->unpin(pinned);
  add(1, large);
}

TEST_F(PeftBudgetTest, O2_AFailedLoadTakesTheUserPinsWithIt) {
  make_manager(8, 8);
  const TaskId task = register_adapter(3);
  source_of(task).fail_read_after = 0;
  manager_->pin(task);
  manager_->wait_idle(kPatience);
  EXPECT_NE(manager_->load_error(task), nullptr);
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_THROW(manager_->unpin(task), InvalidArgumentError);
  manager_->pin(task);
  manager_->wait_idle(kPatience);
  EXPECT_TRUE(content_is_right(task, Tier::host));
}

TEST_F(PeftBudgetTest, ATaskInUseIsNotForgotten) {
  make_manager(8, 8);
  const TaskId task = register_adapter(2);
  add(1, task);
  const auto lease = ensure({1});
  EXPECT_EQ(thrown_by<AdapterInUseError>([&] { manager_->unregister_task(task); })->num_owners, 1U);
  done(1);
  EXPECT_THROW(manager_->unregister_task(task), AdapterInUseError) << "leased";
  lease->close();
  manager_->pin(task);
  EXPECT_THROW(manager_->unregister_task(task), AdapterInUseError) << "pinned";
  manager_->unpin(task);
  manager_->unregister_task(task);
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  EXPECT_THROW(start_to_add(2, task), PeftTaskNotCachedError);
  manager_->unregister_task(task);  // unknown by now
}

TEST_F(PeftBudgetTest, IterationStatisticsCountEachTransitionOnce) {
  make_manager(4, 2);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(2);
  add(1, first);
  add(2, first);
  add(1, first);  // nothing
  ensure_and_close({1, 2});
  pause(1);
  pause(1);  // nothing
  pause(2);  // the device copy loses its last active owner
  add(1, first);
  add(3, second);
  ensure_and_close({3});  // evicts the first from the device
  done(3);
  done(3);  // nothing
  const IterationStats stats = manager_->get_and_reset_iteration_stats();
  EXPECT_EQ(stats.requests_paused, 2U);
  EXPECT_EQ(stats.requests_resumed, 1U);
  EXPECT_EQ(stats.requests_terminated, 1U);
  EXPECT_EQ(stats.tasks_released_device, 2U);
  EXPECT_EQ(stats.tasks_released_host, 1U);
  EXPECT_EQ(stats.tasks_evicted_device, 1U);
  EXPECT_EQ(stats.pages_evicted_device, 2U);
  EXPECT_EQ(stats.tasks_evicted_host, 0U);
  EXPECT_EQ(stats.device_pages_total, 2U);
  EXPECT_EQ(stats.device_pages_available, 0U);
  EXPECT_EQ(stats.host_pages_total, 4U);
  EXPECT_EQ(stats.host_pages_available, 0U);
  EXPECT_EQ(stats.device_tasks_in_progress, 0U);
  EXPECT_EQ(stats.device_tasks_done, 1U);
  EXPECT_EQ(stats.active_tasks, 1U);
  EXPECT_EQ(stats.paused_tasks, 1U);
  const IterationStats next = manager_->get_and_reset_iteration_stats();
  EXPECT_EQ(next.requests_paused, 0U);
  EXPECT_EQ(next.tasks_evicted_device, 0U);
  EXPECT_EQ(next.device_pages_total, 2U);
}

}  // namespace
}  // namespace pagedlora
