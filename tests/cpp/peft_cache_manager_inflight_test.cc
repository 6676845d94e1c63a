// Several batches in flight: what their leases hold, and who waits for reads that are still launched
// (design 3.4: L1, L2, L3).
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::PeftTest;
using testing_support::thrown_by;

class PeftInflightTest : public PeftTest {
 protected:
  PeftInflightTest() { options_.max_inflight_batches = 2; }

  TaskId add_new(std::uint64_t request, std::uint32_t pages) {
    const TaskId task = register_adapter(pages);
    add(request, task);
    return task;
  }
};

TEST_F(PeftInflightTest, L2_NoLeaseEndsAnother) {
  make_manager(8, 4);
  add_new(1, 2);
  add_new(2, 2);
  const auto first = ensure({1});
  const auto second = ensure({2});
  EXPECT_TRUE(first->is_open());
  EXPECT_TRUE(content_is_right(*first, 1));
  EXPECT_TRUE(content_is_right(*second, 2));
  EXPECT_EQ(manager_->open_lease_tasks().size(), 2U);
  first->close();
  EXPECT_TRUE(second->is_open());
  EXPECT_EQ(manager_->open_lease_tasks().size(), 1U);
}

TEST_F(PeftInflightTest, L2_OneMoreThanMayBeInFlightIsRefusedAndChangesNothing) {
  make_manager(8, 8);
  for (std::uint64_t request = 1; request <= 3; ++request) {
    add_new(request, 2);
  }
  const auto first = ensure({1});
  auto second = ensure({2});
  EXPECT_THROW(ensure({3}), InvalidArgumentError);
  EXPECT_TRUE(first->is_open());
  EXPECT_TRUE(second->is_open());
  second.reset();  // dropped, so closed
  EXPECT_TRUE(content_is_right(*ensure({3}), 3));
}

TEST_F(PeftInflightTest, L2_TheBudgetOfABatchIsWhatOpenLeasesLeave) {
  make_manager(16, 4);
  const TaskId first = add_new(1, 2);
  add_new(2, 2);
  add_new(3, 3);
  add_new(4, 2);
  const auto lease = ensure({1});
  ensure_and_close({2});  // the device is full: one leased, one not
  const auto error = thrown_by<LoraCacheFullError>([&] { ensure({3}); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->needed_pages, 3U);
  EXPECT_EQ(error->free_pages, 0U);
  EXPECT_EQ(error->evictable_pages, 2U) << "what the open lease reads is not counted";
  EXPECT_TRUE(lease->is_open());
  EXPECT_TRUE(content_is_right(*lease, 1));
  EXPECT_TRUE(content_is_right(*ensure({4}), 4));
  EXPECT_TRUE(on_device(first));
}

TEST_F(PeftInflightTest, L3_ATaskOfTwoLeasesStaysUntilBothAreClosed) {
  make_manager(16, 4);
  const TaskId shared = add_new(1, 2);
  const auto first = ensure({1});
  const auto second = ensure({1});
  done(1);
  first->close();
  manager_->evict_unowned(Tier::device);
  EXPECT_TRUE(on_device(shared));
  EXPECT_TRUE(content_is_right(*second, 1));
  second->close();
  manager_->evict_unowned(Tier::device);
  EXPECT_FALSE(on_device(shared));
}

TEST_F(PeftInflightTest, L2_PagesOfAClosedLeaseAreWrittenWhenItsReadsAreOver) {
  make_manager(16, 2);
  const TaskId first = add_new(1, 2);
  const TaskId second = add_new(2, 2);
  const auto lease = ensure({1});
  const std::byte* page = lease->find(RequestId{1})->pages.address({0, 0});
  const std::vector<std::byte> before(page, page + kPageBytes);
  device_->hold_reads();
  lease->close();  // the kernels are launched, not done
  manager_->evict_unowned(Tier::device);
  EXPECT_TRUE(on_device(first)) << "it has an owner";
  std::atomic<bool> ensured{false};
  std::shared_ptr<BatchLease> next;
  std::thread helper([&] {
    next = ensure({2});
    ensured = true;
  });
  while (manager_->stats().device.tasks_evicted == 0) {
    std::this_thread::yield();
  }
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(std::memcmp(page, before.data(), kPageBytes), 0) << "written under its readers";
  }
  EXPECT_FALSE(ensured);
  EXPECT_FALSE(on_device(first)) << "evicted at once all the same";
  device_->finish_reads();
  helper.join();
  EXPECT_TRUE(content_is_right(*next, 2));
  EXPECT_TRUE(on_device(second));
}

TEST_F(PeftInflightTest, L2_ReadsThatAreOverDelayNobody) {
  make_manager(16, 2);
  add_new(1, 2);
  add_new(2, 2);
  const auto lease = ensure({1});
  device_->hold_reads();
  lease->close();
  device_->finish_reads();
  EXPECT_TRUE(content_is_right(*ensure({2}), 2));
}

TEST_F(PeftInflightTest, L2_TheNextBatchClosesThePreviousLeaseOnItsStream) {
  options_.max_inflight_batches = 1;
  make_manager(16, 4);
  add_new(1, 2);
  add_new(2, 2);
  const auto first = ensure({1});
  device_->hold_reads();
  const auto second = ensure({2});  // other pages: nothing to wait for
  EXPECT_FALSE(first->is_open());
  EXPECT_TRUE(content_is_right(*second, 2));
  device_->finish_reads();
}

TEST_F(PeftInflightTest, TwoLeasesAndADeviceForTwoNeverOverspend) {
  make_manager(32, 2);
  std::vector<TaskId> tasks;
  for (std::uint64_t request = 0; request < 6; ++request) {
    tasks.push_back(add_new(request, 1));
  }
  std::vector<std::shared_ptr<BatchLease>> open;
  std::vector<std::uint64_t> leased;
  for (std::uint64_t step = 0; step < 60; ++step) {
    const std::uint64_t request = step * 5 % 6;
    if (open.size() == 2) {
      open.erase(open.begin());
      leased.erase(leased.begin());
    }
    // What a scheduler would count: the batch and the open leases.
    std::set<std::uint64_t> needed(leased.begin(), leased.end());
    needed.insert(request);
    ASSERT_LE(needed.size(), 2U);
    open.push_back(ensure({request}));
    leased.push_back(request);
    for (std::size_t i = 0; i < open.size(); ++i) {
      ASSERT_TRUE(content_is_right(*open[i], leased[i]));
    }
    manager_->check_invariants();
  }
}

TEST_F(PeftInflightTest, ClosingTheManagerClosesEveryLease) {
  make_manager(8, 8);
  add_new(1, 2);
  add_new(2, 2);
  const auto first = ensure({1});
  const auto second = ensure({2});
  manager_->close();
  EXPECT_FALSE(first->is_open());
  EXPECT_FALSE(second->is_open());
}

}  // namespace
}  // namespace pagedlora
