// Loads that are late or fail: workers, levels, whose pages are waited for, and what takes effect when
// (design 3.3: C1, C3; 3.4: O5, O6, L5, L6).
#include <gtest/gtest.h>

#include <algorithm>
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

TEST_F(PeftAsyncTest, O5_ARequestIsLoadingUntilAPollSaysThatItIsReady) {
  make_manager(8, 8);
  const TaskId task = register_blocked(2);
  EXPECT_EQ(state_of(1), AdapterState::waiting);
  start_to_add(1, task);
  wait_until_read_begins(task);
  EXPECT_TRUE(manager_->poll().empty());
  EXPECT_EQ(state_of(1), AdapterState::loading);
  EXPECT_FALSE(on_host(task));
  EXPECT_EQ(manager_->free_pages(Tier::host), 6U) << "claimed by the call";
  source_of(task).gate.open();
  while (source_of(task).finishes == 0) {
    std::this_thread::yield();
  }
  EXPECT_EQ(state_of(1), AdapterState::loading) << "nothing takes effect outside a call";
  poll_until_loaded(1);
  EXPECT_EQ(state_of(1), AdapterState::ready);
  EXPECT_TRUE(content_is_right(task, Tier::host));
  done(1);
  EXPECT_EQ(state_of(1), AdapterState::waiting);
}

TEST_F(PeftAsyncTest, O5_EnsureBatchWaitsForTheLoadsOfItsTasks) {
  make_manager(8, 8);
  const TaskId task = register_blocked(2);
  start_to_add(1, task);
  std::thread helper([&] {
    wait_until_read_begins(task);
    source_of(task).gate.open();
  });
  const auto lease = ensure({1});
  helper.join();
  EXPECT_TRUE(content_is_right(*lease, 1));
  EXPECT_EQ(state_of(1), AdapterState::ready);
}

TEST_F(PeftAsyncTest, C1_AFailureIsALevelUntilTheRequestIsDone) {
  make_manager(8, 8);
  const TaskId task = register_adapter(2);
  source_of(task).fail_read_after = 0;
  start_to_add(1, task);
  start_to_add(2, task);
  manager_->wait_idle(kPatience);
  EXPECT_EQ(manager_->poll(), (std::vector{RequestId{1}, RequestId{2}}));
  EXPECT_TRUE(manager_->poll().empty()) << "told once, kept as a level";
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_EQ(state_of(1), AdapterState::failed);
    EXPECT_TRUE(holds<AdapterReadError>(manager_->adapter_error(RequestId{1})));
    EXPECT_TRUE(holds<AdapterReadError>(ensure({1})->errors().at(RequestId{1})));
    start_to_add(1, task);  // changes nothing
    pause(1);
  }
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_TRUE(manager_->active_tasks().empty());
  add(3, task);  // starts anew, and does not heal the others
  EXPECT_EQ(state_of(3), AdapterState::ready);
  EXPECT_EQ(state_of(1), AdapterState::failed);
  done(1);
  EXPECT_EQ(state_of(1), AdapterState::waiting);
  EXPECT_EQ(manager_->adapter_error(RequestId{1}), nullptr);
  add(1, task);
  EXPECT_EQ(state_of(1), AdapterState::ready);
}

TEST_F(PeftAsyncTest, L5_WhoTakesThePagesOfARunningCopysSourceWaitsForIt) {
  make_manager(2, 4);
  const TaskId first = register_adapter(2);
  add(1, first);
  device_->copies.close();
  manager_->prefetch(std::vector{first});  // host -> device, held
  device_->copies.wait_for_begun(1);
  done(1);
  manager_->prefetch({});
  const TaskId second = register_adapter(2);
  start_to_add(2, second);  // takes the pages that the copy reads
  EXPECT_FALSE(on_host(first));
  for (int i = 0; i < 20; ++i) {
    manager_->poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(state_of(2), AdapterState::loading) << "it waits for the copy";
  device_->copies.open();
  settle(2);
  EXPECT_TRUE(content_is_right(second, Tier::host));
  EXPECT_TRUE(content_is_right(first, Tier::device)) << "nothing was written under the copy";
}

TEST_F(PeftAsyncTest, L5_WhoTakesThePagesOfACancelledCopyWaitsForIt) {
  make_manager(8, 2);
  const TaskId first = register_adapter(2);
  const TaskId second = register_adapter(2);
  add(1, first);
  add(2, second);
  device_->copies.close();
  manager_->prefetch(std::vector{first});
  device_->copies.wait_for_begun(1);
  done(1);
  manager_->prefetch({});
  std::thread helper([&] {
    while (manager_->is_task_cached(first, Tier::device) || manager_->stats().device.misses == 0) {
      std::this_thread::yield();
    }
    device_->copies.open();
  });
  const auto lease = ensure({2});  // cancels the copy of the first
  helper.join();
  EXPECT_FALSE(on_device(first));
  EXPECT_TRUE(content_is_right(*lease, 2));
}

TEST_F(PeftAsyncTest, L6_ARereadMustFindWhatTheFirstReadFound) {
  make_manager(2, 2);
  const TaskId task = register_adapter(2);
  add(1, task);
  done(1);
  manager_->evict_unowned(Tier::host);
  adapters_.at(task).source->bytes[100] ^= std::byte{1};  // as if size and times had not changed
  EXPECT_THROW(add(1, task), AdapterSourceChangedError);
  EXPECT_EQ(manager_->free_pages(Tier::host), 2U);
  adapters_.at(task).source->bytes[100] ^= std::byte{1};
  add(1, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
}

TEST_F(PeftAsyncTest, O6_CarriedWeightsLiveUntilTheirCopyEndedEvenIfTheRequestIsGone) {
  make_manager(4, 4);
  const TestAdapter adapter = adapter_of(2);
  block(adapter);
  const CarriedWeights weights{adapter.plan, "digest"};
  manager_->add_request_peft(RequestId{1}, TaskId{7}, &weights);
  adapter.source->gate.wait_for_begun(1);
  done(1);
  EXPECT_EQ(manager_->num_pages_of(TaskId{7}), 2U) << "still known";
  adapter.source->gate.open();
  manager_->wait_idle(kPatience);
  EXPECT_TRUE(on_host(TaskId{7}));
  start_to_add(2, TaskId{7});  // without sending them again
  adapters_[TaskId{7}] = adapter;
  EXPECT_TRUE(content_is_right(TaskId{7}, Tier::host));
}

TEST_F(PeftAsyncTest, C3_AnUnownedLoadInTheWayIsCancelled) {
  make_manager(2, 2);
  const TaskId first = register_blocked(2);
  start_to_add(1, first);
  wait_until_read_begins(first);
  done(1);  // nobody wants it any more; it goes on as long as nobody needs the pages
  EXPECT_EQ(manager_->free_pages(Tier::host), 0U);
  const TaskId second = register_adapter(2);
  add(2, second);
  EXPECT_TRUE(content_is_right(second, Tier::host));
  EXPECT_EQ(manager_->stats().host.tasks_evicted, 1U);
  source_of(first).gate.open();
}

TEST_F(PeftAsyncTest, C3_PollAppliesWhatAllRanksAgreeOn) {
  make_manager(8, 8);
  const TaskId first = register_adapter(1);
  const TaskId second = register_adapter(1);
  const TaskId third = register_adapter(1);
  source_of(third).fail_open = true;
  start_to_add(1, first);
  start_to_add(2, second);
  start_to_add(3, third);
  std::vector<LoadOutcome> seen;
  const auto nothing_yet = [&](const std::vector<LoadOutcome>& ended) {
    seen = ended;
    return std::vector<LoadOutcome>{};
  };
  while (seen.size() < 3) {
    manager_->poll({}, nothing_yet);
    std::this_thread::yield();
  }
  EXPECT_EQ(state_of(1), AdapterState::loading);
  EXPECT_NE(std::ranges::find(seen, LoadOutcome{third, Tier::host, false}), seen.end());
  const auto failed = manager_->poll({}, [&](const std::vector<LoadOutcome>&) {
    return std::vector{LoadOutcome{first, Tier::host, true}, LoadOutcome{second, Tier::host, false},
                       LoadOutcome{third, Tier::host, true}};
  });
  EXPECT_EQ(failed, (std::vector{RequestId{2}, RequestId{3}}));
  EXPECT_EQ(state_of(1), AdapterState::ready);
  EXPECT_EQ(state_of(2), AdapterState::failed) << "it failed on another rank";
  EXPECT_TRUE(holds<AdapterNotFoundError>(manager_->adapter_error(RequestId{3})));
}

// How far a load has come must not show: here the refill has ended when the batch is ensured.
TEST_F(PeftAsyncTest, C3_ABatchTakesOverOnlyTheLoadsThatItWaitsFor) {
  make_manager(8, 8);
  const TaskId task = register_adapter(2);
  add(1, task);
  ensure_and_close({1});
  done(1);
  manager_->evict_unowned(Tier::host);
  const TaskId absent = register_adapter(2);
  start_to_add(1, task);  // refilled from the device, where it is
  start_to_add(2, absent);
  std::vector<LoadOutcome> ended;
  while (ended.size() < 2) {
    manager_->poll({}, [&](const std::vector<LoadOutcome>& outcomes) {
      ended = outcomes;
      return std::vector<LoadOutcome>{};
    });
  }
  const auto lease = ensure({1, 2});
  EXPECT_EQ(lease->tasks().size(), 2U);
  EXPECT_TRUE(on_host(absent)) << "its device copy is made of it";
  EXPECT_FALSE(on_host(task)) << "nobody waited for it";
  manager_->poll();
  EXPECT_TRUE(on_host(task));
}

TEST_F(PeftAsyncTest, OnePassFillsBothTiersWhereTheDeviceIsOrdinaryMemory) {
  make_one_pass_manager(8, 8);
  const TaskId task = register_blocked(4, 10'000);
  start_to_add(1, task);
  wait_until_read_begins(task);
  std::thread helper([&] {
    while (manager_->free_pages(Tier::device) == 8) {
      std::this_thread::yield();
    }
    source_of(task).gate.open();
  });
  const auto lease = ensure({1});
  helper.join();
  EXPECT_TRUE(content_is_right(*lease, 1));
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_EQ(one_pass_device_->copies_from_host, 0) << "no copy between the tiers";
}

TEST_F(PeftAsyncTest, ClosingGivesUpEveryLoadAndReturns) {
  make_manager(8, 8);
  const TaskId blocked = register_blocked(2);
  start_to_add(1, blocked);
  wait_until_read_begins(blocked);
  std::thread waiting([&] { EXPECT_THROW(ensure({1}), InvalidArgumentError); });
  while (manager_->free_pages(Tier::device) == 8) {
    std::this_thread::yield();
  }
  manager_->close();
  waiting.join();
  EXPECT_EQ(state_of(1), AdapterState::failed);
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  EXPECT_THROW(start_to_add(2, blocked), InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
