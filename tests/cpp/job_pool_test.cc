// Work on threads that can be given up (design 3.3: C4): order, limits, abandoned threads, the end.
#include "internal/job_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/fake/gate.h"
#include "thrown_by.h"

namespace pagedlora::internal {
namespace {

using namespace std::chrono_literals;
using fake::Gate;
using testing_support::holds;
using testing_support::thrown_by;

struct Stop : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls a function, behind a gate that is open unless a test closes it.
class TestJob final : public Job {
 public:
  explicit TestJob(std::function<void()> work = [] {}) : work_(std::move(work)) {}
  ~TestJob() override { at_end(); }

  void run(std::span<std::byte> scratch) override {
    if (is_stopped()) {
      throw Stop("stopped before it began");
    }
    gate.pass();
    std::ranges::fill(scratch, std::byte{1});  // its thread's own, whatever became of the pool
    work_();
  }

  using Job::is_stopped;

  Gate gate;
  std::function<void()> at_end = [] {};

 private:
  std::function<void()> work_;
};
using JobPtr = std::shared_ptr<TestJob>;

class JobPoolTest : public ::testing::Test {
 protected:
  ~JobPoolTest() override {
    for (const JobPtr& job : blocked_) {
      job->gate.open();
    }
  }

  void make_pool(std::size_t num_workers, std::size_t max_abandoned = 0) {
    pool_.emplace(board_, clock_, JobPool::Options{num_workers, max_abandoned, 256, kLimit});
  }

  template <class Call>
  auto locked(Call&& call) {
    const std::scoped_lock lock(board_->mutex);
    return call();
  }
  JobPtr submit(JobPtr job) {
    locked([&] { pool_->submit(job); });
    return job;
  }
  JobPtr submit(std::function<void()> work = [] {}) {
    return submit(std::make_shared<TestJob>(std::move(work)));
  }
  // It runs until its gate is opened, which the end of the test does.
  JobPtr submit_blocked() {
    blocked_.push_back(std::make_shared<TestJob>());
    blocked_.back()->gate.close();
    return submit(blocked_.back());
  }
  JobPtr start_blocked() {
    const JobPtr job = submit_blocked();
    job->gate.wait_for_begun(1);
    return job;
  }
  void let_go(const JobPtr& job) {
    job->gate.open();
    EXPECT_TRUE(becomes_true([&] { return job->is_over(); }));
  }
  void expire_after(Clock::Time time) {
    clock_->advance(time);
    locked([&] { pool_->expire(); });
  }

  // Whether the condition, looked at with the lock, comes to hold.
  template <class Condition>
  bool becomes_true(Condition condition) {
    std::unique_lock lock(board_->mutex);
    return board_->changed.wait_for(lock, kPatience, condition);
  }
  // The same for what changes without a word, and cannot be asked for with the lock.
  template <class Condition>
  static bool comes_true(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < end) {
      if (condition()) {
        return true;
      }
      std::this_thread::yield();
    }
    return false;
  }
  std::exception_ptr error_of(const JobPtr& job) {
    return locked([&] { return job->error(); });
  }
  bool succeeds(const JobPtr& job) {
    return becomes_true([&] { return job->is_finished(); }) && error_of(job) == nullptr;
  }
  bool is_late(const JobPtr& job) { return holds<AdapterLoadTimeout>(error_of(job)); }
  AdapterLoadTimeout lateness_of(const JobPtr& job) {
    return *thrown_by<AdapterLoadTimeout>([&] { std::rethrow_exception(error_of(job)); });
  }
  std::size_t num_finished() {
    return locked([&] { return board_->finished.size(); });
  }
  auto ask(auto question) {
    return locked([&] { return std::invoke(question, *pool_); });
  }

  static constexpr Clock::Time kLimit = 10s;
  static constexpr std::chrono::seconds kPatience{60};
  std::shared_ptr<JobBoard> board_ = std::make_shared<JobBoard>();
  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  std::optional<JobPool> pool_;
  std::vector<JobPtr> blocked_;
};

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

TEST_F(JobPoolTest, AJobGivenToStoppedWorkersFailsAtOnce) {
  make_pool(1);
  locked([&] { pool_->stop(std::make_exception_ptr(InvalidArgumentError("closed"))); });
  const JobPtr job = submit();
  EXPECT_TRUE(holds<InvalidArgumentError>(error_of(job)));
  EXPECT_TRUE(job->is_over());
}

TEST_F(JobPoolTest, WhatAJobDoesWithPagesIsOverWhenTheJobIsGone) {
  auto job = std::make_shared<TestJob>();
  const std::shared_ptr<const PageUse> use = job->use();
  EXPECT_FALSE(use->is_over());
  job.reset();
  EXPECT_TRUE(use->is_over()) << "it was never given to a pool";
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
