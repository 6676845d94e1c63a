// Corners where two things meet: a batch's time-out and a load that has not begun, a waiter and
// somebody who gives up what it waits for, a failure and the end of its request, new weights under an
// old task id and a full tier, user pins and weights that are sent again.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::comes_true;
using testing_support::holds;
using testing_support::PeftAsyncTest;
using testing_support::TestAdapter;
using testing_support::thrown_by;
using testing_support::Waiter;

class PeftCornersTest : public PeftAsyncTest {
 protected:
  // With the system's clock, by which nobody looks again before the limit unless told to.
  void make_manager_that_waits_long() {
    options_.clock = nullptr;
    options_.load_timeout = std::chrono::hours(1);
    make_manager(4, 4);
  }
  // Whether a batch of the request, whose load hangs, is over as soon as `give_up` has happened.
  void expect_to_wake_the_batch_of(std::uint64_t request, const std::function<void()>& give_up) {
    std::shared_ptr<BatchLease> lease;
    Waiter batch([&] { lease = ensure({request}); });
    ASSERT_TRUE(comes_true([&] { return manager_->free_pages(Tier::device) == 2; }));
    give_up();
    EXPECT_TRUE(batch.ends_in_time()) << "nobody told it";
    if (lease == nullptr) {
      manager_->close();
      return;
    }
    EXPECT_TRUE(holds<InvalidArgumentError>(lease->errors().at(RequestId{request})));
    EXPECT_EQ(manager_->free_pages(Tier::device), 4U);
  }

  static constexpr std::uint64_t kCarried = 7;
};

// Its batch gave it up; it is still queued behind another load, and nothing is written there.
TEST_F(PeftCornersTest, L1_DevicePagesOfALoadThatIsStillQueuedAreFreeForOthersAtOnce) {
  options_.num_put_workers = 1;
  make_one_pass_manager(8, 2);
  const TaskId other = register_adapter(2);
  add(9, other);
  const TaskId first = register_blocked(1);
  const TaskId second = register_blocked(1);
  const TaskId queued = register_adapter(2);
  start_to_add(1, first);
  start_to_add(2, second);
  start_to_add(3, queued);
  wait_until_read_begins(first);
  std::shared_ptr<BatchLease> lease;
  Waiter batch([&] { lease = ensure({3}); });
  ASSERT_TRUE(comes_true([&] { return manager_->free_pages(Tier::device) == 0; }));
  clock_->advance(kLimit / 2);
  source_of(first).gate.open();
  wait_until_read_begins(second);  // later than the batch, so its time is not up
  clock_->advance(kLimit / 2);
  ASSERT_TRUE(batch.ends_in_time());
  EXPECT_TRUE(holds<AdapterLoadTimeout>(lease->errors().at(RequestId{3})));
  EXPECT_EQ(source_of(queued).opens, 0) << "it has not begun";
  EXPECT_EQ(state_of(3), AdapterState::loading) << "its host part goes on";

  Waiter next([&] { lease = ensure({9}); });
  const bool is_free_at_once = next.ends_in_time();
  EXPECT_TRUE(is_free_at_once) << "the pages are kept for the queued load";
  let_everything_go();
  ASSERT_TRUE(is_free_at_once || next.ends_in_time());
  settle(3);
  EXPECT_TRUE(content_is_right(*lease, 9));
  EXPECT_TRUE(content_is_right(queued, Tier::host));
}

TEST_F(PeftCornersTest, L8_EvictingALoadWakesTheBatchThatWaitsForIt) {
  make_manager_that_waits_long();
  const TaskId task = register_blocked(2);
  start_to_add(1, task);
  wait_until_read_begins(task);
  expect_to_wake_the_batch_of(1, [&] {
    done(1);
    manager_->evict_unowned(Tier::host);
  });
}

TEST_F(PeftCornersTest, L8_AClaimThatCancelsALoadWakesTheBatchThatWaitsForIt) {
  make_manager_that_waits_long();
  const TaskId task = register_blocked(2);
  const TaskId next = register_blocked(4);  // hangs as well: its end would wake everybody
  start_to_add(1, task);
  wait_until_read_begins(task);
  expect_to_wake_the_batch_of(1, [&] {
    done(1);
    start_to_add(2, next);
  });
}

TEST_F(PeftCornersTest, C1_PollDoesNotNameWhoWasDoneSinceTheFailure) {
  make_manager(4, 4);
  const TaskId task = register_adapter(1);
  source_of(task).fail_open = true;
  start_to_add(1, task);
  start_to_add(2, task);
  ASSERT_TRUE(manager_->wait_idle(kPatience));
  done(1);
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{2}});
}

TEST_F(PeftCornersTest, C1_PollNamesWhoFailedTwiceOnce) {
  make_manager(4, 4);
  const TaskId task = register_adapter(1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    done(1);
    source_of(task).fail_open = true;
    start_to_add(1, task);
    ASSERT_TRUE(manager_->wait_idle(kPatience));
  }
  EXPECT_EQ(manager_->poll(), std::vector{RequestId{1}});
}

TEST_F(PeftCornersTest, O4_AStartedRequestWithNewWeightsMayRevokeWhoHasNotStarted) {
  make_manager(4, 4);
  add(1, kCarried, adapter_of(1), "old");
  done(1);
  const TestAdapter old = adapters_.at(TaskId{kCarried});
  const TaskId waiting = register_adapter(3);
  add(2, waiting);
  const TestAdapter adapter = adapter_of(3);
  const CarriedWeights weights{adapter.plan, "new"};
  const auto send = [&](bool started) {
    manager_->add_request_peft(RequestId{3}, TaskId{kCarried}, &weights, started);
  };
  EXPECT_THROW(send(false), LoraCacheFullError);
  EXPECT_EQ(state_of(2), AdapterState::ready);
  EXPECT_TRUE(content_is_right(TaskId{kCarried}, Tier::host)) << "nothing has changed";
  ASSERT_NO_THROW(send(true));
  settle(3);
  adapters_[TaskId{kCarried}] = adapter;
  EXPECT_TRUE(content_is_right(TaskId{kCarried}, Tier::host));
  EXPECT_EQ(state_of(2), AdapterState::waiting);
  EXPECT_FALSE(on_host(waiting));
}

TEST_F(PeftCornersTest, O2_PinsLeaveRoomForTheLargestCarriedWeightsToo) {
  make_manager(4, 4);
  add(1, kCarried, adapter_of(2), "digest");
  manager_->pin(register_adapter(1));
  manager_->pin(register_adapter(1));
  const TaskId third = register_adapter(1);
  const auto error = thrown_by<LoraCacheFullError>([&] { manager_->pin(third); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->needed_pages, 3U) << "itself and the carried ones";
  EXPECT_EQ(error->free_pages, 2U);
}

TEST_F(PeftCornersTest, O2_WeightsThatAreSentAgainFitBesideAsManyPinsAsMayBe) {
  make_manager(4, 4);
  add(1, kCarried, adapter_of(2), "digest");
  manager_->pin(TaskId{kCarried});
  for (bool has_room = true; has_room;) {
    has_room = !thrown_by<LoraCacheFullError>([&] { manager_->pin(register_adapter(1)); });
  }
  const TestAdapter again = adapters_.at(TaskId{kCarried});
  EXPECT_NO_THROW(add(2, kCarried, again, "digest"));
  EXPECT_EQ(state_of(2), AdapterState::ready);
}

// A refill is what a host copy is made with from the device's.
class PeftRefillTest : public PeftAsyncTest {
 protected:
  // A request whose task is on the device and comes back to the host from there.
  TaskId refill() {
    make_manager(4, 4);
    const TaskId task = register_adapter(2);
    add(1, task);
    ensure_and_close({1});
    done(1);
    manager_->evict_unowned(Tier::host);
    return task;
  }
  bool has_ended(const LoadOutcome& outcome) {
    return comes_true([&] { return ended() == std::vector{outcome}; });
  }
  void expect_source_to_be_read_instead(TaskId task, bool loaded) {
    ASSERT_TRUE(has_ended({task, Tier::host, loaded}));
    EXPECT_TRUE(apply({{task, Tier::host, false}}).empty()) << "nobody has failed";
    EXPECT_FALSE(on_host(task));
    ASSERT_TRUE(has_ended({task, Tier::host, true}));
    apply({{task, Tier::host, true}});
    EXPECT_EQ(source_of(task).opens, 2);
    EXPECT_TRUE(content_is_right(task, Tier::host));
    EXPECT_EQ(state_of(1), AdapterState::ready);
  }
};

TEST_F(PeftRefillTest, L6_ThatFailsReadsTheSourceInstead) {
  const TaskId task = refill();
  device_->fail_copy_after = 0;
  start_to_add(1, task);
  expect_source_to_be_read_instead(task, false);
}

TEST_F(PeftRefillTest, L6_ThatFailsOnAnotherRankReadsTheSourceInstead) {
  const TaskId task = refill();
  start_to_add(1, task);
  expect_source_to_be_read_instead(task, true);
}

}  // namespace
}  // namespace pagedlora
