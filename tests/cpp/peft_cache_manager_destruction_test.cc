// Who destroys what a load owns: its source may be anybody's and do anything when it goes, even call
// the manager, so it never goes under the manager's lock.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "dying_source.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"

namespace pagedlora {
namespace {

using testing_support::comes_true;
using testing_support::DyingSource;
using testing_support::PeftAsyncTest;
using testing_support::TestAdapter;
using testing_support::Waiter;

class PeftDestructionTest : public PeftAsyncTest {
 protected:
  PeftDestructionTest() { options_.num_put_workers = 1; }

  // The only worker hangs; its request is the last of those that were added.
  void block_worker(int num_abandoned_before = 0) {
    make_manager(64, 64);
    for (int i = 0; i <= num_abandoned_before; ++i) {
      if (blocking_request_ != 0) {
        let_time_pass();
        manager_->poll();
      }
      const TaskId task = register_blocked(1);
      start_to_add(++blocking_request_, task);
      wait_until_read_begins(task);
    }
  }

  // Queued behind the worker's load. From now on nobody but the load has its source.
  void queue_load() {
    const TestAdapter adapter = adapter_of(1);
    PeftCacheManager* manager = manager_.get();
    const auto dies = [manager, is_gone = is_gone_] {
      static_cast<void>(manager->stats());  // takes the lock
      *is_gone = true;
    };
    const auto source = std::make_shared<DyingSource>(adapter.source, dies);
    const CarriedWeights weights{
        std::make_shared<const AdapterPlan>(*config_, adapter.plan->rows(), source), "digest"};
    manager_->add_request_peft(RequestId{kRequest}, kTask, &weights);
  }
  void give_up_load() {
    done(kRequest);
    manager_->evict_unowned(Tier::host);
    EXPECT_EQ(manager_->free_pages(Tier::host), 63U);
  }

  // Whether the call destroys the source, and comes back. If it does not, its lock is held for ever,
  // and nothing of the manager can be touched any more.
  void expect_to_destroy_source(const std::function<void()>& call) {
    EXPECT_FALSE(*is_gone_);
    Waiter waiter(call);
    const bool has_ended = waiter.ends_in_time();
    EXPECT_TRUE(has_ended) << "it waits for the lock that it holds";
    if (!has_ended) {
      waiter.abandon();
      static_cast<void>(manager_.release());
      return;
    }
    EXPECT_TRUE(*is_gone_);
  }

  static constexpr int kMostAbandoned = 16;
  static constexpr std::uint64_t kRequest = 99;
  static constexpr TaskId kTask{7};
  std::uint64_t blocking_request_ = 0;
  const std::shared_ptr<std::atomic<bool>> is_gone_ = std::make_shared<std::atomic<bool>>(false);
};

TEST_F(PeftDestructionTest, L8_AWorkerDropsTheSourceOfALoadThatWasGivenUpWhileQueued) {
  block_worker();
  queue_load();
  give_up_load();
  expect_to_destroy_source([this] {
    let_everything_go();
    EXPECT_TRUE(comes_true([this] { return is_gone_->load(); }));
  });
}

TEST_F(PeftDestructionTest, L8_ClosingDestroysTheSourceOfAQueuedLoad) {
  block_worker();
  queue_load();
  expect_to_destroy_source([manager = manager_.get()] { manager->close(); });
}

TEST_F(PeftDestructionTest, L8_ClosingDestroysTheSourceOfALoadThatWasGivenUpWhileQueued) {
  block_worker();
  queue_load();
  give_up_load();
  expect_to_destroy_source([manager = manager_.get()] { manager->close(); });
}

// When all workers are stuck and no more may be abandoned, the queue fails in the call that finds
// out, and so its loads are destroyed there.
class PeftStuckDestructionTest : public PeftDestructionTest {
 protected:
  void SetUp() override {
    block_worker(kMostAbandoned);
    queue_load();
    give_up_load();
    let_time_pass();
  }
};

TEST_F(PeftStuckDestructionTest, L8_APollDestroysTheSourceOfAQueuedLoad) {
  expect_to_destroy_source([manager = manager_.get()] { manager->poll(); });
}

TEST_F(PeftStuckDestructionTest, L8_APollWithAGroupDestroysTheSourceOfAQueuedLoad) {
  expect_to_destroy_source([manager = manager_.get()] {
    manager->poll({}, [](const std::vector<LoadOutcome>& ended) { return ended; });
  });
}

TEST_F(PeftStuckDestructionTest, L8_WaitingDestroysTheSourceOfAQueuedLoad) {
  expect_to_destroy_source([manager = manager_.get()] { manager->wait_idle({}); });
}

TEST_F(PeftStuckDestructionTest, L8_ABatchDestroysTheSourceOfAQueuedLoad) {
  expect_to_destroy_source([manager = manager_.get(), request = RequestId{blocking_request_}] {
    manager->ensure_batch({&request, 1});
  });
}

}  // namespace
}  // namespace pagedlora
