// Loads that several threads read, without memory or threads for some of it: each succeeds, with fewer
// helpers, or fails as a whole; nothing is lost, and the next one is as if nothing had been.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "failing_new.h"
#include "failing_threads.h"
#include "job_pool_fixture.h"
#include "large_adapter_fixture.h"
#include "shared_load_fixture.h"

namespace pagedlora::internal {
namespace {

using testing_support::comes_true;
using testing_support::FailingNew;
using testing_support::FailingThreads;
using testing_support::holds;
using testing_support::JobPoolTest;
using testing_support::JobPtr;
using testing_support::LargeAdapterTest;
using testing_support::SharedLoadTest;

class SharedLoadFailureTest : public SharedLoadTest {
 protected:
  ~SharedLoadFailureTest() override { FailingThreads::disarm(); }

  // Those of its helpers that came read all pieces but the one that its own reader may have.
  std::exception_ptr end_with_helpers_first(const std::shared_ptr<SourceLoad>& load,
                                            const testing_support::NumberedReaders& readers) {
    EXPECT_TRUE(comes_true([&] {
      return readers.gates[0].num_begun() > 0 || locked([&] { return load->is_finished(); });
    }));
    wait_for_helpers();
    readers.gates[0].open();
    return end_of_all(load);
  }
  // As many threads as may read it, and it is right.
  void expect_to_be_read_by_all() {
    host_.poison();
    const std::size_t begun = adapter_.source->gate.num_begun();
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    start(load);
    EXPECT_TRUE(comes_true([&] { return adapter_.source->gate.num_begun() == begun + kReaders; }));
    EXPECT_EQ(end_of_all(load), nullptr);
    EXPECT_TRUE(is_right(host_));
  }
};

TEST_F(SharedLoadFailureTest, WithoutMemoryALoadHasFewerHelpersOrFailsAsAWhole) {
  int num_failed = 0;
  int num_with_fewer = 0;
  bool has_failed = true;
  for (int number = 0; has_failed; ++number) {
    SCOPED_TRACE("allocation " + std::to_string(number));
    host_.poison();
    use_workers(kReaders);  // whose threads are begun anew
    const auto readers = number_readers();
    readers->gates[0].close();
    const auto load = make_shared_load();
    FailingNew::arm(FailingNew::Who::other_threads, number);
    start(load);
    const std::exception_ptr error = end_with_helpers_first(load, *readers);
    FailingNew::disarm();
    has_failed = FailingNew::has_failed();
    if (error == nullptr) {
      EXPECT_TRUE(is_right(host_));
      num_with_fewer += readers->num_opened() < kReaders ? 1 : 0;
    } else {
      EXPECT_TRUE(has_failed && holds<std::bad_alloc>(error));
      ++num_failed;
    }
    EXPECT_EQ(adapter_.source->live_readers, 0);
    expect_to_be_read_by_all();
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(num_failed, 10);
  EXPECT_GT(num_with_fewer, 3);
}

// The helpers of the first load that could be had hang, and those that could not be had are no longer
// waited for: the second load has as many as there is room for.
TEST_F(SharedLoadFailureTest, AHelperWhoseThreadCannotStartIsHadByTheNextLoad) {
  for (std::size_t num_threads = 1; num_threads < kReaders; ++num_threads) {
    SCOPED_TRACE(num_threads);
    use_workers(kReaders);
    renew_adapter();
    const testing_support::TestAdapter first_adapter = adapter_;
    FailingThreads::arm(static_cast<std::int64_t>(num_threads));
    const auto first = start_with_readers(num_threads);
    FailingThreads::disarm();
    EXPECT_EQ(locked([&] { return helpers_->num_idle(); }), kReaders - num_threads);

    renew_adapter();
    const auto second = make_shared_load();
    adapter_.source->gate.close();
    start(second);
    const std::size_t num_readers = 1 + std::min(kReaders - 2, kReaders - num_threads);
    EXPECT_TRUE(comes_true([&] { return adapter_.source->gate.num_begun() == num_readers; }));
    EXPECT_EQ(end_of(second), nullptr);
    EXPECT_TRUE(is_right(host_));
    first_adapter.source->gate.open();
    EXPECT_EQ(end_of_all(first), nullptr);
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(SharedLoadFailureTest, ALoadWithoutAThreadFailsAndTheNextOneDoesNot) {
  FailingThreads::arm(0);
  const auto load = make_shared_load();
  start(load);
  EXPECT_TRUE(holds<std::system_error>(end_of_all(load)));
  EXPECT_EQ(adapter_.source->opens, 0);
  FailingThreads::disarm();
  expect_to_be_read_by_all();
}

class LargeAdapterFailureTest : public LargeAdapterTest {};

TEST_F(LargeAdapterFailureTest, WithoutMemoryALoadOfAManagerSucceedsOrFailsAndARetryWorks) {
  const LargeAdapter adapter = make_large();
  bool has_failed = true;
  for (int number = 0; has_failed; ++number) {
    SCOPED_TRACE("allocation " + std::to_string(number));
    make_manager();
    const TaskId task = manager_->register_task(adapter.content.plan);
    FailingNew::arm(FailingNew::Who::other_threads, number);
    add(1, task);
    ASSERT_TRUE(manager_->wait_idle(std::chrono::seconds(60)));
    FailingNew::disarm();
    has_failed = FailingNew::has_failed();
    ASSERT_NO_THROW(manager_->check_invariants());
    if (const std::exception_ptr error = manager_->adapter_error(RequestId{1})) {
      EXPECT_TRUE(has_failed && holds<std::bad_alloc>(error));
      EXPECT_EQ(manager_->stats().source_reads, 0U);
      manager_->mark_request_done(RequestId{1});
      add(1, task);
      ASSERT_TRUE(manager_->wait_idle(std::chrono::seconds(60)));
    }
    ASSERT_EQ(state_of(1), AdapterState::ready);
    EXPECT_TRUE(content_is_right(task, Tier::host, adapter));
    EXPECT_EQ(manager_->stats().source_reads, 1U);
    give_up(1);
    ASSERT_TRUE(comes_true([&] { return adapter.content.source->live_readers == 0; }));
    ASSERT_FALSE(HasFailure());
  }
}

class JobPoolThreadsTest : public JobPoolTest {
 protected:
  ~JobPoolThreadsTest() override { FailingThreads::disarm(); }
};

TEST_F(JobPoolThreadsTest, AJobWithoutAThreadWaitsForThoseThatAreNotStuck) {
  make_pool(2);
  const JobPtr busy = start_blocked();
  FailingThreads::arm(0);
  const JobPtr waiting = submit();
  EXPECT_EQ(num_finished(), 0U);
  busy->gate.open();
  EXPECT_TRUE(succeeds(waiting));
}

TEST_F(JobPoolThreadsTest, C4_AJobWithoutAThreadFailsIfTheOthersAreStuck) {
  make_pool(2);
  const JobPtr stuck = start_blocked();
  expire_after(kLimit);
  FailingThreads::arm(0);
  const JobPtr failing = submit();
  EXPECT_TRUE(holds<std::system_error>(error_of(failing)));
  EXPECT_TRUE(failing->is_over());
  FailingThreads::disarm();
  EXPECT_TRUE(succeeds(submit()));
}

TEST_F(JobPoolThreadsTest, AJobThatIsWorthNothingLaterIsNotKeptWithoutAThread) {
  make_pool(1);
  const JobPtr job = std::make_shared<testing_support::TestJob>();
  FailingThreads::arm(0);
  EXPECT_FALSE(locked([&] { return pool_->try_submit(job); }));
  EXPECT_EQ(job.use_count(), 1);
  FailingThreads::disarm();
  EXPECT_TRUE(locked([&] { return pool_->try_submit(job); }));
  EXPECT_TRUE(succeeds(job));
}

}  // namespace
}  // namespace pagedlora::internal
