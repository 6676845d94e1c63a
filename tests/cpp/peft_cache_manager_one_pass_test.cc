// One pass over a source that fills both tiers: a load of two outcomes, which a group may let take
// effect one by one (design 3.3, C5; 3.2).
#include <gtest/gtest.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fake_source.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::comes_true;
using testing_support::PeftAsyncTest;
using testing_support::thrown_by;
using testing_support::Waiter;

// Holds back whoever waits, so that a test decides who looks first at what has ended.
class HoldingClock final : public Clock {
 public:
  Time now() const override { return Time{}; }
  void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& /*condition*/,
                  Time /*deadline*/) const override {
    lock.unlock();
    gate.pass();
    lock.lock();
  }

  mutable fake::Gate gate;
};

class PeftOnePassTest : public PeftAsyncTest {
 protected:
  PeftOnePassTest() {
    options_.max_inflight_batches = 2;
    options_.clock = holding_clock_;
  }
  ~PeftOnePassTest() override { holding_clock_->gate.open(); }

  // A batch that waits for a joint load, which has ended and has not taken effect.
  void end_joint_load() {
    make_one_pass_manager(8, 8);
    task_ = register_blocked(4, kHoleBytes);
    start_to_add(1, task_);
    wait_until_read_begins(task_);
    holding_clock_->gate.close();
    batch_ = std::make_unique<Waiter>([this] { lease_ = ensure({1}); });
    holding_clock_->gate.wait_for_begun(1);
    source_of(task_).gate.open();
    ASSERT_TRUE(comes_true([&] { return ended() == std::vector{host(true), device(true)}; }));
    EXPECT_EQ(one_pass_device_->copies_from_host, 0);
  }
  void let_batch_go() {
    holding_clock_->gate.open();
    ASSERT_TRUE(batch_->ends_in_time());
    manager_->check_invariants();
  }
  LoadOutcome host(bool loaded) const { return {task_, Tier::host, loaded}; }
  LoadOutcome device(bool loaded) const { return {task_, Tier::device, loaded}; }
  bool holds_failure_elsewhere(const std::exception_ptr& error) const {
    const auto caught = thrown_by<Error>([&] { std::rethrow_exception(error); });
    return std::string(caught.value().what()).find("on another rank") != std::string::npos;
  }

  static constexpr std::size_t kHoleBytes = 10'000;
  const std::shared_ptr<HoldingClock> holding_clock_ = std::make_shared<HoldingClock>();
  TaskId task_{};
  std::shared_ptr<BatchLease> lease_;
  std::unique_ptr<Waiter> batch_;  // last: its thread ends first
};

TEST_F(PeftOnePassTest, C5_TheHostsOutcomeCanTakeEffectAlone) {
  end_joint_load();
  apply({host(true)});
  EXPECT_TRUE(on_host(task_));
  EXPECT_FALSE(on_device(task_));
  EXPECT_EQ(ended(), std::vector{device(true)});
  manager_->check_invariants();
  let_batch_go();
  EXPECT_TRUE(content_is_right(*lease_, 1));
  EXPECT_TRUE(content_is_right(task_, Tier::host));
  EXPECT_EQ(source_of(task_).opens, 1);
}

TEST_F(PeftOnePassTest, C5_TheDevicesOutcomeCanTakeEffectAlone) {
  end_joint_load();
  apply({device(true)});
  EXPECT_TRUE(on_device(task_));
  EXPECT_FALSE(on_host(task_));
  EXPECT_EQ(ended(), std::vector{host(true)});
  manager_->check_invariants();
  let_batch_go();
  EXPECT_TRUE(content_is_right(*lease_, 1));
  EXPECT_FALSE(on_host(task_)) << "the batch does not wait for it any more";
  EXPECT_EQ(ended(), std::vector{host(true)});
  apply({host(true)});
  EXPECT_TRUE(content_is_right(task_, Tier::host));
}

TEST_F(PeftOnePassTest, C5_TheDevicesPartFailsAloneIfItFailedOnAnotherRank) {
  end_joint_load();
  EXPECT_TRUE(apply({device(false)}).empty());
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  EXPECT_EQ(ended(), std::vector{host(true)});
  manager_->check_invariants();
  let_batch_go();
  EXPECT_TRUE(holds_failure_elsewhere(lease_->errors().at(RequestId{1})));
  apply({host(true)});
  EXPECT_EQ(state_of(1), AdapterState::ready);
  EXPECT_TRUE(content_is_right(*ensure({1}), 1)) << "a copy of the host's";
}

TEST_F(PeftOnePassTest, C5_BothPartsFailIfTheHostsFailedOnAnotherRank) {
  end_joint_load();
  EXPECT_EQ(apply({host(false)}), std::vector{RequestId{1}});
  EXPECT_TRUE(ended().empty());
  EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  EXPECT_EQ(manager_->free_pages(Tier::device), 8U);
  let_batch_go();
  EXPECT_TRUE(holds_failure_elsewhere(lease_->errors().at(RequestId{1})));
}

}  // namespace
}  // namespace pagedlora
