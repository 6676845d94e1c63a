// What is brought in ahead of its batch, and whom it may displace (design 3.4: L3, L4).
#include <gtest/gtest.h>

#include <vector>

#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"

namespace pagedlora {
namespace {

using testing_support::PeftTest;

class PeftPrefetchTest : public PeftTest {
 protected:
  // A step of an engine that waits: loads take effect before and after.
  void prefetch(const std::vector<TaskId>& window) {
    for (int repeat = 0; repeat < 2; ++repeat) {  // host first, then device
      manager_->prefetch(window);
      ASSERT_TRUE(manager_->wait_idle(kPatience));
      manager_->check_invariants();
    }
  }
  std::vector<TaskId> register_adapters(std::size_t count, std::uint32_t pages = 1) {
    std::vector<TaskId> tasks;
    for (std::size_t i = 0; i < count; ++i) {
      tasks.push_back(register_adapter(pages));
    }
    return tasks;
  }
};

TEST_F(PeftPrefetchTest, L4_BringsTheWindowIntoBothTiersWithoutOwners) {
  make_manager(8, 8);
  const auto tasks = register_adapters(3);
  prefetch(tasks);
  for (const TaskId task : tasks) {
    EXPECT_TRUE(content_is_right(task, Tier::host));
    EXPECT_TRUE(content_is_right(task, Tier::device));
    EXPECT_TRUE(manager_->is_task_done(task));
  }
  add(1, tasks[0]);
  ensure_and_close({1});
  EXPECT_EQ(manager_->stats().device.hits, 1U);
  EXPECT_EQ(manager_->stats().device.misses, 0U);
  EXPECT_EQ(manager_->stats().device.tasks_loaded, 3U);
}

TEST_F(PeftPrefetchTest, L4_DevicePagesAreClaimedOnlyOnceTheHostCopyIsResident) {
  make_manager(8, 8);
  const TaskId task = register_adapter(2);
  source_of(task).gate.close();
  manager_->prefetch(std::vector{task});
  source_of(task).gate.wait_for_begun(1);
  manager_->prefetch(std::vector{task});
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  source_of(task).gate.open();
  manager_->wait_idle(kPatience);
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  manager_->prefetch(std::vector{task});
  EXPECT_EQ(manager_->free_pages(Tier::device), 6U);
}

TEST_F(PeftPrefetchTest, L4_NeverGivesUpANearerMemberAndStopsWhenItWould) {
  make_manager(8, 2);
  const auto tasks = register_adapters(3);
  prefetch(tasks);
  EXPECT_TRUE(on_device(tasks[0]));
  EXPECT_TRUE(on_device(tasks[1]));
  EXPECT_FALSE(on_device(tasks[2]));
  prefetch({tasks[2], tasks[1], tasks[0]});  // now it is nearer than the first
  EXPECT_TRUE(on_device(tasks[2]));
  EXPECT_TRUE(on_device(tasks[1]));
  EXPECT_FALSE(on_device(tasks[0]));
  EXPECT_EQ(manager_->stats().device.tasks_evicted, 1U);
}

TEST_F(PeftPrefetchTest, L4_NeverGivesUpWhatIsStartedPausedOrLeased) {
  make_manager(16, 3);
  const auto tasks = register_adapters(3);
  for (std::uint64_t i = 0; i < 3; ++i) {
    add(i, tasks[i]);
  }
  const auto lease = ensure({0, 1, 2});
  pause(1);
  done(2);  // leased still
  const TaskId wanted = register_adapter(1);
  prefetch({wanted});
  EXPECT_TRUE(on_host(wanted));
  EXPECT_FALSE(on_device(wanted));
  lease->close();
  prefetch({wanted});  // the third has no owner any more
  EXPECT_TRUE(on_device(wanted));
  EXPECT_FALSE(on_device(tasks[2]));
  EXPECT_TRUE(on_device(tasks[0]));
  EXPECT_TRUE(on_device(tasks[1]));
}

TEST_F(PeftPrefetchTest, L3_TheWindowAndUnstartedOwnersGoAfterTheUnownedFarthestFirst) {
  make_manager(16, 5);
  const auto tasks = register_adapters(5);
  add(4, tasks[4]);  // an owner that never started, in no window
  prefetch({tasks[4]});
  add(3, tasks[3]);
  ensure_and_close({3});
  done(3);  // unowned, but used last
  prefetch({tasks[0], tasks[1], tasks[2]});
  ASSERT_EQ(manager_->free_pages(Tier::device), 0U);
  std::vector<std::size_t> order;
  for (std::uint64_t request = 10; request < 15; ++request) {
    add(request, register_adapter(1));
    ensure_and_close({request});
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (!on_device(tasks[i]) && std::ranges::find(order, i) == order.end()) {
        order.push_back(i);
      }
    }
  }
  EXPECT_EQ(order, (std::vector<std::size_t>{3, 4, 2, 1, 0}));
}

TEST_F(PeftPrefetchTest, L4_EachCallReplacesTheWindow) {
  make_manager(16, 2);
  const auto tasks = register_adapters(2);
  prefetch(tasks);
  manager_->prefetch({});  // nobody waits any more: both are unowned
  const TaskId next = register_adapter(2);
  prefetch({next});
  EXPECT_TRUE(on_device(next));
  EXPECT_FALSE(on_device(tasks[0]));
}

TEST_F(PeftPrefetchTest, L4_HostPagesOfTheWindowAreKeptFromThoseBehind) {
  make_manager(2, 8);
  const auto tasks = register_adapters(3);
  prefetch(tasks);
  EXPECT_TRUE(on_host(tasks[0]));
  EXPECT_TRUE(on_host(tasks[1]));
  EXPECT_EQ(source_of(tasks[2]).opens, 0);
  add(1, tasks[2]);  // an owner may: the farthest of the window goes
  EXPECT_TRUE(on_host(tasks[0]));
  EXPECT_FALSE(on_host(tasks[1]));
}

TEST_F(PeftPrefetchTest, UnknownRepeatedAndImpossibleTasksAreIgnored) {
  make_manager(8, 2);
  const TaskId task = register_adapter(1);
  const TaskId too_large = register_adapter(3);
  prefetch({TaskId{77}, task, too_large, task});
  EXPECT_TRUE(on_device(task));
  EXPECT_FALSE(on_host(too_large));
}

TEST_F(PeftPrefetchTest, AFailedPrefetchHarmsNobodyAndIsTriedAgain) {
  make_manager(8, 8);
  const TaskId task = register_adapter(2);
  source_of(task).fail_open = true;
  manager_->prefetch(std::vector{task});
  manager_->wait_idle(kPatience);
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_TRUE(manager_->load_error(task) != nullptr);
  prefetch({task});
  EXPECT_TRUE(content_is_right(task, Tier::device));
  EXPECT_EQ(manager_->load_error(task), nullptr);
}

}  // namespace
}  // namespace pagedlora
