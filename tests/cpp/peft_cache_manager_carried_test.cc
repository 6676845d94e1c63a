// Weights that a request carries (design 3.4, O6): known as long as a tier holds them.
#include <gtest/gtest.h>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"

namespace pagedlora {
namespace {

using testing_support::PeftTest;
using testing_support::TestAdapter;

class PeftCarriedTest : public PeftTest {
 protected:
  void SetUp() override { make_manager(4, 4); }

  static constexpr TaskId kTask{7};
};

TEST_F(PeftCarriedTest, O6_CarriedWeightsAreReadOnceIntoTheHostTier) {
  const TestAdapter adapter = adapter_of(2);
  add(1, 7, adapter, "digest");
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
  EXPECT_TRUE(content_is_right(*ensure({1}), 1));
  EXPECT_EQ(adapter.source->opens, 1);
  EXPECT_EQ(manager_->num_pages_of(kTask), 2U);
}

TEST_F(PeftCarriedTest, O6_TaskIdZeroIsATaskLikeAnyOther) {
  add(1, 0, adapter_of(1), "digest");
  EXPECT_EQ(manager_->task_of(RequestId{1}), TaskId{0});
  EXPECT_TRUE(content_is_right(*ensure({1}), 1));
}

TEST_F(PeftCarriedTest, O6_LaterRequestsNeedNoWeightsWhileTheTaskIsCached) {
  add(1, 7, adapter_of(2), "digest");
  add(2, kTask);
  done(1);
  done(2);
  add(3, kTask);  // unowned, but still there
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
  EXPECT_EQ(source_of(kTask).opens, 1);
}

TEST_F(PeftCarriedTest, O6_TheSameWeightsAgainAreNotRead) {
  add(1, 7, adapter_of(2), "digest");
  const TestAdapter again = adapter_of(2);
  const TestAdapter first = adapters_.at(kTask);
  add(2, 7, again, "digest");
  EXPECT_EQ(again.source->opens, 0);
  adapters_[kTask] = first;
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
}

TEST_F(PeftCarriedTest, O6_OtherWeightsUnderALiveIdAreAConflict) {
  add(1, 7, adapter_of(2), "digest");
  const TestAdapter first = adapters_.at(kTask);
  EXPECT_THROW(add(2, 7, adapter_of(1), "other"), RequestConflictError);
  pause(1);
  EXPECT_THROW(add(2, 7, adapter_of(1), "other"), RequestConflictError);
  EXPECT_EQ(manager_->task_of(RequestId{2}), std::nullopt);
  adapters_[kTask] = first;
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
}

TEST_F(PeftCarriedTest, O6_OtherWeightsAreAConflictWhileALeaseReadsTheOldOnes) {
  add(1, 7, adapter_of(2), "digest");
  const auto lease = ensure({1});
  done(1);
  const TestAdapter first = adapters_.at(kTask);
  EXPECT_THROW(add(2, 7, adapter_of(1), "other"), RequestConflictError);
  adapters_[kTask] = first;
  EXPECT_TRUE(content_is_right(*lease, 1));
  lease->close();
  EXPECT_NO_THROW(add(2, 7, adapter_of(1), "other"));
}

TEST_F(PeftCarriedTest, O6_OtherWeightsReplaceThoseThatNobodyOwnsInBothTiers) {
  add(1, 7, adapter_of(2), "digest");
  ensure_and_close({1});
  done(1);
  add(2, 7, adapter_of(1), "other");
  EXPECT_FALSE(on_device(kTask));
  EXPECT_EQ(manager_->num_pages_of(kTask), 1U);
  EXPECT_EQ(manager_->free_pages(Tier::host), 3U);
  EXPECT_TRUE(content_is_right(*ensure({2}), 2));
}

TEST_F(PeftCarriedTest, O6_LostWeightsMustBeSentAgain) {
  add(1, 7, adapter_of(2), "digest");
  done(1);
  add(2, register_adapter(4));  // takes the whole host tier
  EXPECT_FALSE(on_host(kTask));
  done(2);
  EXPECT_THROW(add(3, kTask), PeftTaskNotCachedError);
  EXPECT_EQ(manager_->task_of(RequestId{3}), std::nullopt);
  add(3, 7, adapters_.at(kTask), "digest");
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
}

TEST_F(PeftCarriedTest, L6_WeightsLostFromTheHostComeBackFromTheDevice) {
  add(1, 7, adapter_of(2), "digest");
  ensure_and_close({1});
  done(1);
  manager_->evict_unowned(Tier::host);
  add(2, kTask);
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
  EXPECT_EQ(source_of(kTask).opens, 1);
}

TEST_F(PeftCarriedTest, O6_AnUnknownTaskWithoutWeightsIsNotCached) {
  EXPECT_THROW(add(1, TaskId{99}), PeftTaskNotCachedError);
  EXPECT_THROW(manager_->num_pages_of(TaskId{99}), PeftTaskNotCachedError);
  EXPECT_THROW(manager_->read_task(TaskId{99}, Tier::host, [](const auto&, const auto&) {}),
               PeftTaskNotCachedError);
}

TEST_F(PeftCarriedTest, WeightsForARegisteredTaskAreAConflict) {
  const TaskId task = register_adapter(1);
  const TestAdapter registered = adapters_.at(task);
  EXPECT_THROW(add(1, task.value, adapter_of(1), "digest"), RequestConflictError);
  adapters_[task] = registered;
  add(1, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
}

TEST_F(PeftCarriedTest, RegisteredIdsStepOverIdsThatCarriedWeightsTook) {
  const std::uint64_t taken = PeftCacheManager::kFirstRegisteredTask;
  add(1, taken, adapter_of(1), "digest");
  EXPECT_EQ(register_adapter(1).value, taken + 1);
}

TEST_F(PeftCarriedTest, CarriedWeightsThatCanNeverFitReplaceNothing) {
  add(1, 7, adapter_of(2), "digest");
  done(1);
  const TestAdapter first = adapters_.at(kTask);
  EXPECT_THROW(add(2, 7, adapter_of(5), "other"), AdapterTooLargeError);
  EXPECT_THROW(add(2, 8, adapter_of(5), "other"), AdapterTooLargeError);
  EXPECT_THROW(manager_->num_pages_of(TaskId{8}), PeftTaskNotCachedError);
  adapters_[kTask] = first;
  EXPECT_TRUE(content_is_right(kTask, Tier::host));
}

}  // namespace
}  // namespace pagedlora
