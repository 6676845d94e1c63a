// Large adapters in a manager, each read by a worker and a helper: what is counted, what is noticed,
// and who lets go of what when the load is given up, or the manager, while one of them hangs.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "large_adapter_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::comes_true;
using testing_support::holds;
using testing_support::LargeAdapterTest;
using testing_support::Waiter;

class SharedLoadsOfAManagerTest : public LargeAdapterTest {
 protected:
  struct DyingAdapter {
    LargeAdapter adapter;
    std::shared_ptr<std::atomic<bool>> is_gone;
  };

  // Adds a request that carries an adapter, and lets both readers of it hang. From then on only they and
  // the manager have its source, which takes the manager's lock when it is destroyed.
  DyingAdapter add_dying(std::uint64_t request) {
    auto is_gone = std::make_shared<std::atomic<bool>>(false);
    LargeAdapter adapter = make_large([manager = manager_.get(), is_gone] {
      static_cast<void>(manager->stats());
      *is_gone = true;
    });
    close_gates(adapter);
    const CarriedWeights weights{adapter.content.plan, "digest"};
    manager_->add_request_peft(RequestId{request}, TaskId{request}, &weights);
    adapter.content.plan.reset();
    wait_for_readers(adapter);
    return {adapter, is_gone};
  }
  // Lets the readers go one after the other: the second one destroys the source.
  void expect_the_last_reader_to_destroy_it(const DyingAdapter& dying, std::size_t last) {
    const LargeAdapter& adapter = dying.adapter;
    adapter.readers->gates[1 - last].open();
    EXPECT_TRUE(comes_true([&] { return adapter.content.source->live_readers == 1; }));
    EXPECT_FALSE(*dying.is_gone);
    adapter.readers->gates[last].open();
    if (!comes_true([&] { return dying.is_gone->load(); })) {
      static_cast<void>(manager_.release());  // its lock is held for ever
      FAIL() << "it waits for the lock that it holds";
    }
  }
};

TEST_F(SharedLoadsOfAManagerTest, ALargeAdapterIsReadByTwoAndRightInBothTiers) {
  const LargeAdapter adapter = make_large();
  const TaskId task = manager_->register_task(adapter.content.plan);
  add_blocked(1, task, adapter);
  adapter.readers->open_gates();
  manager_->ensure_batch(std::array{RequestId{1}})->close();
  EXPECT_EQ(adapter.readers->num_opened(), 2U);
  EXPECT_TRUE(content_is_right(task, Tier::host, adapter));
  EXPECT_TRUE(content_is_right(task, Tier::device, adapter));
}

TEST_F(SharedLoadsOfAManagerTest, ALoadIsCountedOnceWhoeverReadsIt) {
  const LargeAdapter adapter = make_large();
  const TaskId task = manager_->register_task(adapter.content.plan);
  const auto check = [&](std::uint64_t number) {
    manager_->ensure_batch(std::array{RequestId{number}})->close();
    const PeftCacheStats stats = manager_->stats();
    EXPECT_EQ(stats.source_reads, number);
    EXPECT_EQ(stats.source_rereads, number - 1);
    EXPECT_EQ(stats.source_bytes, number * kAdapterBytes);
    for (const TierStats& tier : {stats.host, stats.device}) {
      EXPECT_EQ(tier.tasks_loaded, number);
      EXPECT_EQ(tier.bytes_loaded, number * kAdapterBytes);
      EXPECT_EQ(tier.misses, number);
      EXPECT_EQ(tier.tasks_evicted, number - 1);
    }
    EXPECT_EQ(stats.failed_loads, 0U);
  };
  for (int i = 0; i < 3; ++i) {
    load_until_both_read(adapter, task, check);
  }
}

TEST_F(SharedLoadsOfAManagerTest, ALoadThatFailsForBothIsCountedOnceAndAsNoRead) {
  const LargeAdapter adapter = make_large();
  const TaskId task = manager_->register_task(adapter.content.plan);
  add_blocked(1, task, adapter);
  adapter.content.source->bytes.resize(kAdapterBytes / 4);  // both read beyond its end
  adapter.readers->open_gates();
  EXPECT_TRUE(manager_->wait_idle(std::chrono::seconds(60)));
  EXPECT_EQ(state_of(1), AdapterState::failed);
  const PeftCacheStats stats = manager_->stats();
  EXPECT_EQ(stats.failed_loads, 1U);
  EXPECT_EQ(stats.source_reads + stats.source_bytes + stats.host.tasks_loaded, 0U);
}

TEST_F(SharedLoadsOfAManagerTest, L6_ABitThatFlippedIsFoundWhenTwoReadItAgain) {
  const LargeAdapter adapter = make_large();
  const TaskId task = manager_->register_task(adapter.content.plan);
  std::vector<std::byte>& bytes = adapter.content.source->bytes;
  const auto is_right = [&](std::uint64_t /*request*/) {
    EXPECT_TRUE(content_is_right(task, Tier::host, adapter));
  };
  const auto is_refused = [&](std::uint64_t request) {
    EXPECT_EQ(state_of(request), AdapterState::failed);
    EXPECT_TRUE(holds<AdapterSourceChangedError>(manager_->adapter_error(RequestId{request})));
  };
  load_until_both_read(adapter, task, is_right);
  for (const std::size_t at : {kAdapterBytes / 4, kAdapterBytes - 1}) {  // a bit of either reader
    bytes[at] ^= std::byte{1};
    load_until_both_read(adapter, task, is_refused);
    bytes[at] ^= std::byte{1};
    load_until_both_read(adapter, task, is_right);
  }
}

TEST_F(SharedLoadsOfAManagerTest, C4_ALoadWhoseReadersHangKeepsNoOtherWaiting) {
  const LargeAdapter hanging = make_large();
  const TaskId first = manager_->register_task(hanging.content.plan);
  add_blocked(1, first, hanging);
  const LargeAdapter other = make_large();
  const TaskId second = manager_->register_task(other.content.plan);
  add(2, second);
  EXPECT_TRUE(comes_true([&] {
    manager_->poll();
    return state_of(2) == AdapterState::ready;
  }));
  EXPECT_TRUE(content_is_right(second, Tier::host, other));
  EXPECT_EQ(state_of(1), AdapterState::loading);
  hanging.readers->open_gates();
  EXPECT_TRUE(manager_->wait_idle(std::chrono::seconds(60)));
  EXPECT_TRUE(content_is_right(first, Tier::host, hanging));
}

TEST_F(SharedLoadsOfAManagerTest, L8_TheLastReaderOfALoadThatWasGivenUpDestroysItsSource) {
  for (const std::size_t last : {0U, 1U}) {  // the worker, its helper
    SCOPED_TRACE(last);
    make_manager();
    const DyingAdapter dying = add_dying(1);
    give_up(1);
    expect_the_last_reader_to_destroy_it(dying, last);
  }
}

TEST_F(SharedLoadsOfAManagerTest, L8_TheLastReaderDestroysTheSourceAfterTheManagerIsClosed) {
  for (const std::size_t last : {0U, 1U}) {
    SCOPED_TRACE(last);
    make_manager();
    const DyingAdapter dying = add_dying(1);
    manager_->close();
    EXPECT_EQ(manager_->free_pages(Tier::host), manager_->max_pages(Tier::host));
    EXPECT_TRUE(holds<InvalidArgumentError>(manager_->adapter_error(RequestId{1})));
    expect_the_last_reader_to_destroy_it(dying, last);
  }
}

// What a thread still has that hangs goes with it, whether or not there is a manager.
TEST_F(SharedLoadsOfAManagerTest, L8_AManagerWhoseReadersHangIsDestroyedInTimeAndNothingIsLost) {
  for (const std::vector<std::size_t>& hanging : {std::vector<std::size_t>{0}, {1}, {0, 1}}) {
    SCOPED_TRACE(::testing::PrintToString(hanging));
    make_manager();
    const LargeAdapter adapter = make_large();
    const auto& source = adapter.content.source;
    const TaskId task = manager_->register_task(adapter.content.plan);
    add_blocked(1, task, adapter);
    if (hanging.size() == 1) {  // the other one reads all but the piece of the one that hangs
      adapter.readers->gates[1 - hanging.front()].open();
      EXPECT_TRUE(comes_true([&] { return source->reads == kNumChunks / 2; }));
    }
    Waiter destroying([this] { manager_.reset(); });
    if (!destroying.ends_in_time()) {
      destroying.abandon();
      FAIL() << "it waits for a reader";
    }
    const auto num_hanging = static_cast<int>(hanging.size());
    EXPECT_TRUE(comes_true([&] { return source->live_readers == num_hanging; }));
    EXPECT_GT(adapter.content.plan.use_count(), 1);
    adapter.readers->open_gates();
    EXPECT_TRUE(comes_true([&] { return adapter.content.plan.use_count() == 1; }));
    EXPECT_EQ(source->live_readers, 0);
  }
}

}  // namespace
}  // namespace pagedlora
