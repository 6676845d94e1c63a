// A pool of few threads whose time stands still until a test moves it, and jobs that wait at a gate.
#pragma once

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

#include "internal/job_pool.h"
#include "pagedlora/errors.h"
#include "pagedlora/fake/gate.h"
#include "thrown_by.h"

namespace pagedlora::testing_support {

using fake::Gate;
using internal::Job;
using internal::JobBoard;
using internal::JobPool;

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

  static constexpr Clock::Time kLimit = std::chrono::seconds(10);
  static constexpr std::chrono::seconds kPatience{60};
  std::shared_ptr<JobBoard> board_ = std::make_shared<JobBoard>();
  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  std::optional<JobPool> pool_;
  std::vector<JobPtr> blocked_;
};

}  // namespace pagedlora::testing_support
