// The jobs that fill a task's pages (design 3.3: C4; 3.4: L5, L6, O6): what they write, what they
// wait for, and that nothing is written once they were told to stop.
#include "internal/load_jobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "load_fixture.h"
#include "random_seeds.h"

namespace pagedlora::internal {
namespace {

using testing_support::holds;
using testing_support::num_steps;
using testing_support::Pages;
using testing_support::TestUse;

using LoadJobsTest = testing_support::LoadFixture;
using SourceLoadTest = LoadJobsTest;

TEST_F(SourceLoadTest, O6_FillsThePagesWithWhatTheSourceHoldsAndLetsGoOfThePlan) {
  const auto load = make_load(host_.target());
  start_up_to_chunk(load, kChunks - 1);
  const AdapterPlan copy = *std::exchange(adapter_.plan, nullptr);
  EXPECT_EQ(end_of(load), nullptr);
  EXPECT_EQ(adapter_.source.use_count(), 2) << "a job that is kept would keep carried weights";
  adapter_.plan = std::make_shared<const AdapterPlan>(copy);
  EXPECT_TRUE(is_right(host_));
  EXPECT_EQ(adapter_.source->reads, static_cast<int>(kChunks));
  EXPECT_EQ(adapter_.source->live_readers, 0);
  EXPECT_EQ(load->source_bytes(), adapter_.source->bytes.size());
}

TEST_F(SourceLoadTest, C4_NothingIsWrittenOnceStopHasReturned) {
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    SCOPED_TRACE(chunk);
    use_adapter(512, 512, 32);
    const auto load = make_load(host_.target());
    ASSERT_TRUE(add_device(load, on_device_.target()));
    start_up_to_chunk(load, chunk);
    EXPECT_EQ(host_.are_poisoned(), chunk == 0);
    EXPECT_FALSE(load->is_over());
    stop(load);
    EXPECT_TRUE(load->is_over()) << "though its reader is blocked";
    host_.poison();
    on_device_.poison();
    EXPECT_TRUE(holds<JobStopped>(end_of(load)));
    EXPECT_TRUE(host_.are_poisoned() && on_device_.are_poisoned());
  }
}

TEST_F(SourceLoadTest, C4_StopWaitsForAChunkThatIsBeingWritten) {
  use_adapter(4096, 4096, 64);
  std::vector<std::byte> scratch(adapter_.source->bytes.size());  // one chunk
  std::mt19937 rng(1);
  for (int round = 0; round < std::max(num_steps(60), 10); ++round) {
    const auto load = make_load(host_.target());
    std::thread reader([&] {
      try {
        load->run(scratch);
      } catch (const JobStopped&) {
      }
    });
    while (adapter_.source->reads == round) {
    }
    const auto moment = std::chrono::steady_clock::now() + std::chrono::microseconds(rng() % 1500);
    while (std::chrono::steady_clock::now() < moment) {
    }
    stop(load);
    host_.poison();
    reader.join();
    ASSERT_TRUE(host_.are_poisoned());
  }
}

TEST_F(SourceLoadTest, ADeviceMayBeAddedAndDroppedAtAnyMoment) {
  std::mt19937 rng(1);
  std::array<int, 2> seen{};
  for (int round = 0; round < num_steps(300); ++round) {
    use_adapter(512, 512, 32);
    const auto load = make_load(host_.target());
    start_up_to_chunk(load, rng() % 4);
    let_read(0, rng() % (kChunks + 1));  // some more, while the device is added
    const bool added = add_device(load, on_device_.target());
    adapter_.source->gate.open();
    for (const int until = static_cast<int>(rng() % kChunks); adapter_.source->reads < until;) {
    }
    const bool dropped = rng() % 2 == 0;
    if (dropped) {
      load->drop_device();
      on_device_.poison();
    }
    ASSERT_EQ(end_of(load), nullptr);
    ASSERT_TRUE(is_right(host_));
    ASSERT_TRUE(added && !dropped ? is_right(on_device_) : on_device_.are_poisoned());
    ++seen[added ? 1 : 0];
  }
  EXPECT_GT(std::ranges::min(seen), 0);
}

TEST_F(SourceLoadTest, ADeviceIsFilledBesideTheHostIfItIsAddedBeforeAQuarterIsRead) {
  const std::uint64_t checksum_alone = run(make_load(host_.target()));
  for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
    SCOPED_TRACE(chunk);
    use_adapter(512, 512, 32);
    const auto load = make_load(host_.target());
    start_up_to_chunk(load, chunk);
    const bool in_time = chunk <= 2;
    EXPECT_EQ(add_device(load, on_device_.target()), in_time);
    EXPECT_EQ(end_of(load), nullptr);
    EXPECT_TRUE(is_right(host_));
    EXPECT_TRUE(in_time ? is_right(on_device_) : on_device_.are_poisoned());
    EXPECT_EQ(adapter_.source->reads, static_cast<int>(kChunks + (in_time ? chunk : 0)));
    EXPECT_EQ(load->checksum(), checksum_alone);
  }
}

TEST_F(SourceLoadTest, L5_ADeviceIsRefusedWhileItsPagesAreInUseOrAnotherIsThere) {
  const auto load = make_load(host_.target());
  start_up_to_chunk(load, 1);
  const auto use = std::make_shared<TestUse>();
  EXPECT_FALSE(add_device(load, on_device_.target({use})));
  use->over = true;
  EXPECT_TRUE(add_device(load, on_device_.target({use})));
  Pages next(layout_, 3);
  EXPECT_FALSE(add_device(load, next.target()));
  let_read(1, 2);
  adapter_.source->gate.wait_for_begun(3);
  EXPECT_FALSE(on_device_.are_poisoned());
  const auto device_use = load->device_use();
  EXPECT_FALSE(device_use->is_over());
  load->drop_device();
  EXPECT_TRUE(device_use->is_over() && !load->is_over()) << "who writes them next need not wait";
  on_device_.poison();
  EXPECT_TRUE(add_device(load, next.target()));
  EXPECT_EQ(end_of(load), nullptr);
  EXPECT_TRUE(is_right(host_) && is_right(next));
  EXPECT_TRUE(on_device_.are_poisoned()) << "it was dropped";
}

TEST_F(SourceLoadTest, C4_DroppedOrStoppedWhileItReadsAgainItWritesNothing) {
  for (const bool stopped : {false, true}) {
    use_adapter(512, 512, 32);
    const auto load = make_load(host_.target());
    start_up_to_chunk(load, 2);
    ASSERT_TRUE(add_device(load, on_device_.target()));
    let_read(2, kChunks);
    adapter_.source->gate.wait_for_begun(kChunks + 1);
    EXPECT_TRUE(is_right(host_));
    stopped ? stop(load) : load->drop_device();
    on_device_.poison();
    const std::exception_ptr error = end_of(load);
    EXPECT_TRUE(stopped ? holds<JobStopped>(error) : error == nullptr);
    EXPECT_TRUE(is_right(host_));
    EXPECT_TRUE(on_device_.are_poisoned());
  }
}

TEST_F(SourceLoadTest, L5_NothingIsReadOrWrittenBeforeEveryUseOfThePagesIsOver) {
  expect_to_wait_for_uses(host_, [&](const FillTarget& target) {
    EXPECT_EQ(adapter_.source->reads, 0);
    return make_load(target);
  });
  EXPECT_EQ(adapter_.source->reads, static_cast<int>(kChunks));
}

TEST_F(SourceLoadTest, C4_StoppedBeforeItReadsItIsOverAndReadsNothing) {
  expect_to_be_over_when_stopped_before_it_writes(
      host_, [&](const FillTarget& target) { return make_load(target); });
  EXPECT_EQ(adapter_.source->opens, 1) << "the queued one was not begun";
}

TEST_F(SourceLoadTest, L6_AFlippedBitAnywhereIsAChangedSource) {
  use_adapter(39, 8, 1);  // 188 bytes, no multiple of a word
  const std::uint64_t first = run(make_load(host_.target()));
  std::vector<std::byte>& bytes = adapter_.source->bytes;
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    const std::byte mask = std::byte{1} << (bit % 8);
    bytes[bit / 8] ^= mask;
    ASSERT_NE(run(make_load(host_.target())), first) << "bit " << bit;
    ASSERT_THROW(run(make_load(host_.target(), first)), AdapterSourceChangedError);
    bytes[bit / 8] ^= mask;
  }
  EXPECT_EQ(run(make_load(host_.target(), first)), first);
}

class TierCopyTest : public LoadJobsTest {
 protected:
  void SetUp() override { run(make_load(host_.target())); }

  std::shared_ptr<TierCopy> to_device(const FillTarget& target) {
    return std::make_shared<TierCopy>(board_, TaskId{1}, device_, TierCopy::Direction::to_device,
                                      host_.own(), target);
  }
};

TEST_F(TierCopyTest, CopiesEitherWayAndLeavesItsSourceAsItIs) {
  const auto there = to_device(on_device_.target());
  start(there);
  EXPECT_EQ(end_of(there), nullptr);
  EXPECT_TRUE(is_right(host_) && is_right(on_device_));
  EXPECT_EQ(device_->copies_from_host, 1);
  host_.poison();
  const auto back = std::make_shared<TierCopy>(
      board_, TaskId{1}, device_, TierCopy::Direction::to_host, on_device_.own(), host_.target());
  start(back);
  EXPECT_EQ(end_of(back), nullptr);
  EXPECT_TRUE(is_right(host_) && is_right(on_device_));
  EXPECT_EQ(device_->copies_to_host, 1);
}

TEST_F(TierCopyTest, L5_WaitsForEveryUseOfThePagesAndStoppedMeanwhileCopiesNothing) {
  const auto make = [&](const FillTarget& target) { return to_device(target); };
  expect_to_be_over_when_stopped_before_it_writes(on_device_, make);
  EXPECT_EQ(device_->copies_from_host, 0);
  expect_to_wait_for_uses(on_device_, make);
}

TEST_F(TierCopyTest, L5_OnceItCopiesItIsOverWhenTheCopyHasEndedThoughStoppedAndLate) {
  const auto copy = to_device(on_device_.target());
  device_->copies.close();
  start(copy);
  device_->copies.wait_for_begun(1);
  stop(copy);
  EXPECT_FALSE(copy->is_over());
  clock_->advance(std::chrono::seconds(10));
  locked([&] { pool_.expire(); });
  EXPECT_FALSE(copy->is_over()) << "it may still write";
  EXPECT_TRUE(holds<AdapterLoadTimeout>(end_of(copy)));
  EXPECT_TRUE(is_right(on_device_)) << "over means that it has written";
}

}  // namespace
}  // namespace pagedlora::internal
