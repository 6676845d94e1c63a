// Work on threads of its own: its order, its errors, when it is idle, and its end.
#include "internal/job_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "job_pool_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/fake/gate.h"
#include "thrown_by.h"

namespace pagedlora::internal {
namespace {

using fake::Gate;
using testing_support::holds;
using testing_support::JobPoolTest;
using testing_support::JobPtr;
using testing_support::Stop;
using testing_support::TestJob;
using testing_support::thrown_by;

TEST_F(JobPoolTest, JobsAreTakenInTheOrderInWhichTheyAreGiven) {
  make_pool(1);
  std::vector<JobPtr> jobs{start_blocked()};
  std::vector<int> taken;
  for (int i = 0; i < 20; ++i) {
    jobs.push_back(submit([&taken, i] { taken.push_back(i); }));
  }
  jobs.front()->gate.open();
  ASSERT_TRUE(succeeds(jobs.back()));
  EXPECT_EQ(taken.size(), 20U);
  EXPECT_TRUE(std::ranges::is_sorted(taken));
  const std::scoped_lock lock(board_->mutex);
  EXPECT_TRUE(std::ranges::equal(board_->finished, jobs)) << "in the order in which they ended";
}

TEST_F(JobPoolTest, AsManyJobsRunAtOnceAsThereAreWorkers) {
  constexpr int kWorkers = 3;
  make_pool(kWorkers);
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  Gate together;
  together.close();
  std::vector<JobPtr> jobs;
  for (int i = 0; i < 4 * kWorkers; ++i) {
    jobs.push_back(submit([&] {
      const int now = ++running;
      int before = most;
      while (before < now && !most.compare_exchange_weak(before, now)) {
      }
      together.pass();
      --running;
    }));
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) {  // one by one, with all workers busy
    together.wait_for_begun(std::min(i + kWorkers, jobs.size()));
    together.let_pass(i);
  }
  EXPECT_TRUE(std::ranges::all_of(jobs, [&](const JobPtr& job) { return succeeds(job); }));
  EXPECT_EQ(most, kWorkers);
}

TEST_F(JobPoolTest, WhatAJobThrowsIsItsErrorAndHarmsNoOther) {
  make_pool(1);
  const JobPtr failing = submit([] { throw AdapterReadError("a file", 5); });
  const JobPtr strange = submit([] { throw 7; });
  const JobPtr fine = submit();
  ASSERT_TRUE(succeeds(fine));
  EXPECT_TRUE(holds<AdapterReadError>(error_of(failing)) && holds<int>(error_of(strange)));
  EXPECT_TRUE(failing->is_over() && strange->is_over() && fine->is_over());
}

TEST_F(JobPoolTest, AJobStoppedInTheQueueNeverDoesItsWork) {
  make_pool(1);
  const JobPtr first = start_blocked();
  std::atomic<bool> worked{false};
  const JobPtr stopped = submit([&] { worked = true; });
  const JobPtr last = submit();
  locked([&] { stopped->stop(); });
  first->gate.open();
  ASSERT_TRUE(succeeds(last));
  EXPECT_FALSE(worked);
}

TEST_F(JobPoolTest, SecondsAreThoseOfTheRunAndNotOfTheQueue) {
  make_pool(1);
  const auto seconds_since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const JobPtr first = start_blocked();
  double inside = 0;
  const JobPtr job = submit([&] {
    const auto start = std::chrono::steady_clock::now();
    while (inside < 0.002) {
      inside = seconds_since(start);
    }
  });
  const auto queued = std::chrono::steady_clock::now();
  EXPECT_TRUE(comes_true([&] { return seconds_since(queued) > 0.02; }));
  const auto released = std::chrono::steady_clock::now();
  first->gate.open();
  ASSERT_TRUE(succeeds(job));
  EXPECT_LE(job->seconds(), seconds_since(released));
  EXPECT_GE(job->seconds(), inside);
  EXPECT_GT(first->seconds(), 0.02);
}

TEST_F(JobPoolTest, AJobGivenToStoppedWorkersFailsAtOnce) {
  make_pool(1);
  locked([&] { pool_->stop(std::make_exception_ptr(InvalidArgumentError("closed"))); });
  const JobPtr job = submit();
  EXPECT_TRUE(holds<InvalidArgumentError>(error_of(job)));
  EXPECT_TRUE(job->is_over());
}

TEST_F(JobPoolTest, AJobThatIsWorthNothingLaterIsTakenAtOnceOrNotAtAll) {
  make_pool(2);
  const auto try_to_submit = [this](const JobPtr& job) {
    return locked([&] { return pool_->try_submit(job); });
  };
  for (int i = 0; i < 2; ++i) {
    blocked_.push_back(std::make_shared<TestJob>());
    blocked_.back()->gate.close();
    EXPECT_TRUE(try_to_submit(blocked_.back())) << "there is room for a thread";
  }
  const JobPtr refused = std::make_shared<TestJob>();
  EXPECT_FALSE(try_to_submit(refused));
  EXPECT_EQ(refused.use_count(), 1) << "the pool does not know it";
  EXPECT_EQ(ask(&JobPool::num_idle), 0U);
  let_go(blocked_.front());
  EXPECT_TRUE(comes_true([&] { return ask(&JobPool::num_idle) == 1; }));
  const JobPtr taken = start_blocked();
  EXPECT_FALSE(try_to_submit(refused));
  let_go(taken);
  EXPECT_TRUE(try_to_submit(refused)) << "by a thread that is idle";
  EXPECT_TRUE(succeeds(refused));
  locked([&] { pool_->stop(std::make_exception_ptr(Stop("the end"))); });
  EXPECT_FALSE(try_to_submit(std::make_shared<TestJob>()));
}

TEST_F(JobPoolTest, WhatAJobDoesWithPagesIsOverWhenTheJobIsGone) {
  auto job = std::make_shared<TestJob>();
  const std::shared_ptr<const PageUse> use = job->use();
  EXPECT_FALSE(use->is_over());
  job.reset();
  EXPECT_TRUE(use->is_over()) << "it was never given to a pool";
}

TEST_F(JobPoolTest, AJobIsDestroyedWithoutTheLock) {
  make_pool(1, 1);
  Gate gate;
  gate.close();
  std::atomic<bool> destroyed{false};
  submit([&] { gate.pass(); })->at_end = [&] {
    const std::scoped_lock lock(board_->mutex);  // would hang
    destroyed = true;
  };
  gate.wait_for_begun(1);
  expire_after(kLimit);
  auto finished = locked([&] { return std::exchange(board_->finished, {}); });
  EXPECT_EQ(finished.size(), 1U);
  finished.clear();
  EXPECT_FALSE(destroyed) << "its thread has the last reference";
  gate.open();
  EXPECT_TRUE(comes_true([&] { return destroyed.load(); }));
}

TEST_F(JobPoolTest, APoolIsIdleWhenNobodyWantsWhatItDoes) {
  make_pool(1, 1);
  EXPECT_TRUE(ask(&JobPool::is_idle));
  const JobPtr running = start_blocked();
  const JobPtr queued = submit();
  locked([&] { running->stop(); });
  EXPECT_FALSE(ask(&JobPool::is_idle)) << "the queued one is wanted";
  locked([&] { queued->stop(); });
  EXPECT_TRUE(ask(&JobPool::is_idle));
  let_go(running);
  const JobPtr late = start_blocked();
  EXPECT_FALSE(ask(&JobPool::is_idle));
  expire_after(kLimit);
  EXPECT_TRUE(ask(&JobPool::is_idle)) << "its end is known, although it still runs";
}

TEST_F(JobPoolTest, StopFinishesEverythingWithItsErrorAndNothingMoreBegins) {
  make_pool(1, 1);
  const JobPtr running = start_blocked();
  std::atomic<bool> worked{false};
  const JobPtr queued = submit([&] { worked = true; });
  locked([&] { pool_->stop(std::make_exception_ptr(Stop("the end"))); });
  EXPECT_TRUE(holds<Stop>(error_of(running)) && holds<Stop>(error_of(queued)));
  EXPECT_TRUE(queued->is_over());
  EXPECT_TRUE(running->is_stopped());
  EXPECT_TRUE(ask(&JobPool::is_idle));
  pool_->join();  // returns, although one is blocked
  EXPECT_FALSE(running->is_over());
  let_go(running);
  pool_.reset();
  EXPECT_EQ(num_finished(), 2U) << "each is finished once";
  EXPECT_FALSE(worked);
}

TEST_F(JobPoolTest, ThePoolEndsWithABlockedJobAndLeavesNoThreadBehind) {
  make_pool(2, 2);
  const JobPtr running = start_blocked();
  ASSERT_TRUE(succeeds(submit()));
  pool_.reset();
  EXPECT_TRUE(holds<InvalidArgumentError>(error_of(running)));
  EXPECT_FALSE(running->is_over());
  let_go(running);
  EXPECT_TRUE(comes_true([&] { return board_.use_count() == 1; }));
}

}  // namespace
}  // namespace pagedlora::internal
