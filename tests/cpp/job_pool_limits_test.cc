// Threads that are given up when the time of their job is up (design 3.3: C4).
#include "internal/job_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "job_pool_fixture.h"
#include "thrown_by.h"

namespace pagedlora::internal {
namespace {

using namespace std::chrono_literals;
using testing_support::JobPoolTest;
using testing_support::JobPtr;
using testing_support::TestJob;
using testing_support::thrown_by;

TEST_F(JobPoolTest, C4_ExpireFinishesExactlyTheJobsWhoseTimeIsUpSinceAWorkerTookThem) {
  make_pool(2, 3);
  EXPECT_EQ(ask(&JobPool::next_expiry), std::nullopt);
  const JobPtr first = start_blocked();
  clock_->advance(4s);
  const JobPtr second = start_blocked();
  const JobPtr queued = submit_blocked();
  EXPECT_EQ(ask(&JobPool::next_expiry), kLimit);
  expire_after(kLimit - 4s - 1ns);
  EXPECT_EQ(num_finished(), 0U);
  expire_after(1ns);
  ASSERT_TRUE(is_late(first));
  EXPECT_EQ(lateness_of(first).limit_seconds, 10);
  queued->gate.wait_for_begun(1);
  EXPECT_EQ(ask(&JobPool::next_expiry), kLimit + 4s);
  expire_after(4s);
  EXPECT_TRUE(is_late(second));
  EXPECT_EQ(num_finished(), 2U) << "each is finished once, and the queued one has its own time";
  EXPECT_EQ(ask(&JobPool::next_expiry), kLimit + 10s);
  expire_after(6s);
  EXPECT_TRUE(is_late(queued));
  EXPECT_EQ(ask(&JobPool::next_expiry), std::nullopt);
}

TEST_F(JobPoolTest, C4_AnAbandonedThreadIsReplacedAndItsJobIsOverWhenItComesBack) {
  make_pool(1, 1);
  const JobPtr late = start_blocked();
  const JobPtr waiting = submit();
  expire_after(kLimit);
  ASSERT_TRUE(is_late(late));
  EXPECT_TRUE(late->is_stopped());
  EXPECT_TRUE(succeeds(waiting)) << "on a thread of its own";
  EXPECT_FALSE(late->is_over()) << "it is still in run()";
  let_go(late);
  EXPECT_TRUE(is_late(late)) << "what it found in the end comes too late";
  EXPECT_EQ(num_finished(), 2U);
}

TEST_F(JobPoolTest, C4_BeyondTheMostAbandonedThreadsJobsFailAtOnce) {
  make_pool(1, 2);
  for (int i = 0; i < 2; ++i) {
    start_blocked();
    expire_after(kLimit);
  }
  const JobPtr stuck = start_blocked();
  const JobPtr queued = submit();
  expire_after(kLimit);
  EXPECT_TRUE(is_late(stuck));
  EXPECT_TRUE(is_late(queued)) << "nobody is left to take it";
  EXPECT_EQ(ask(&JobPool::next_expiry), std::nullopt);
  const JobPtr fresh = submit();
  ASSERT_TRUE(is_late(fresh));
  EXPECT_EQ(lateness_of(fresh).stuck_readers, 3U);
  EXPECT_TRUE(fresh->is_over());
  EXPECT_TRUE(ask(&JobPool::is_idle));
  let_go(stuck);  // the worker that kept its place
  EXPECT_TRUE(succeeds(submit()));
}

TEST_F(JobPoolTest, C4_OneWorkerThatIsNotStuckTakesWhatIsQueued) {
  make_pool(2, 0);
  const JobPtr stuck = start_blocked();
  clock_->advance(kLimit / 2);
  const JobPtr busy = start_blocked();
  const JobPtr queued = submit();
  expire_after(kLimit / 2);
  EXPECT_TRUE(is_late(stuck));
  const JobPtr later = submit();
  EXPECT_EQ(num_finished(), 1U);
  busy->gate.open();
  EXPECT_TRUE(succeeds(queued));
  EXPECT_TRUE(succeeds(later));
}

TEST_F(JobPoolTest, C4_AThreadThatComesBackMakesRoomForAnotherAbandonedOne) {
  make_pool(1, 1);
  const auto is_replaced_when_late = [&] {
    const JobPtr late = start_blocked();
    expire_after(kLimit);
    EXPECT_TRUE(is_late(late));
    const bool is_replaced = succeeds(submit());
    let_go(late);
    return is_replaced;
  };
  EXPECT_TRUE(is_replaced_when_late());
  for (int i = 0; i < 5; ++i) {  // the thread gives its place back a moment after its job is over
    EXPECT_TRUE(comes_true(is_replaced_when_late)) << "round " << i;
  }
}

TEST_F(JobPoolTest, C4_AStuckWorkerThatKeptItsPlaceIsAbandonedOnceAnotherOneIsBack) {
  make_pool(1, 1);
  const JobPtr late = start_blocked();
  expire_after(kLimit);
  const JobPtr stuck = start_blocked();
  expire_after(kLimit);
  ASSERT_TRUE(is_late(stuck));
  EXPECT_TRUE(is_late(submit())) << "nobody is left";
  let_go(late);
  EXPECT_TRUE(comes_true([&] { return succeeds(submit()); })) << "stuck is out now, not late";
}

TEST_F(JobPoolTest, C4_AnAbandonedThreadOutlivesThePoolAndThenLetsGoOfEverything) {
  make_pool(1, 1);
  const std::weak_ptr<TestJob> late = start_blocked();
  expire_after(kLimit);
  pool_.reset();
  const std::weak_ptr<JobBoard> board = board_;
  board_->finished.clear();
  board_.reset();
  EXPECT_FALSE(board.expired()) << "the thread has it";
  std::exchange(blocked_, {}).front()->gate.open();
  EXPECT_TRUE(comes_true([&] { return board.expired() && late.expired(); }));
}

}  // namespace
}  // namespace pagedlora::internal
