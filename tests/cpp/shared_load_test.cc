// A load that several threads read at a time (design 3.3: C4; 3.4: L5): the same pages, the same
// checksum and the same error as from one, and nothing is written once it was told to stop.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "random_seeds.h"
#include "shared_load_fixture.h"

namespace pagedlora::internal {
namespace {

using testing_support::FakeSource;
using testing_support::holds;
using testing_support::num_steps;
using testing_support::SharedLoadTest;

TEST_F(SharedLoadTest, FillsThePagesAsOneReaderDoes) {
  const std::uint64_t checksum_alone = run(make_load(host_.target()));
  host_.poison();
  renew_adapter();
  const auto load = start_up_to_read(0);
  EXPECT_EQ(adapter_.source->live_readers, static_cast<int>(kReaders));
  EXPECT_EQ(end_of_all(load), nullptr);
  EXPECT_TRUE(is_right(host_));
  EXPECT_EQ(adapter_.source->reads, static_cast<int>(kManyChunks));
  EXPECT_EQ(load->source_bytes(), adapter_.source->bytes.size());
  EXPECT_EQ(load->checksum(), checksum_alone);
  EXPECT_EQ(adapter_.source->live_readers, 0);
  EXPECT_EQ(adapter_.source->finishes, static_cast<int>(kReaders)) << "each looks for changes";
}

TEST_F(SharedLoadTest, TakesNoMoreHelpersThanWorkersAreIdle) {
  for (std::size_t num_workers = 1; num_workers <= kReaders; ++num_workers) {
    renew_adapter();
    use_workers(num_workers);
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    start(load);
    adapter_.source->gate.wait_for_begun(num_workers);
    EXPECT_EQ(end_of_all(load), nullptr);
    EXPECT_EQ(adapter_.source->opens, static_cast<int>(num_workers));
  }
}

TEST_F(SharedLoadTest, TakesNoHelpersForOnePiece) {
  use_adapter(512, 512, 32);
  const auto load = make_shared_load();
  start(load);
  EXPECT_EQ(end_of_all(load), nullptr);
  EXPECT_EQ(adapter_.source->opens, 1);
}

TEST_F(SharedLoadTest, C4_NothingIsWrittenOnceStopHasReturned) {
  for (const std::size_t number : {0, 3, 7}) {
    SCOPED_TRACE(number);
    renew_adapter();
    const auto load = start_up_to_read(number);
    EXPECT_FALSE(load->is_over());
    stop(load);
    EXPECT_TRUE(load->is_over()) << "though its readers are blocked";
    host_.poison();
    EXPECT_TRUE(holds<JobStopped>(end_of_all(load)));
    EXPECT_TRUE(host_.are_poisoned());
  }
}

TEST_F(SharedLoadTest, C4_StopWaitsForChunksThatAreBeingWritten) {
  use_adapter(8192, 8192, 64);
  use_workers(kReaders, ScatterPlan::kChunkBytes);  // two pieces, and writing a chunk takes a while
  std::mt19937 rng(1);
  for (int round = 0; round < std::max(num_steps(300), 30); ++round) {
    const int reads = adapter_.source->reads;
    const auto load = make_shared_load();
    start(load);
    while (adapter_.source->reads < reads + 3) {
    }
    const auto moment = std::chrono::steady_clock::now() + std::chrono::microseconds(rng() % 500);
    while (std::chrono::steady_clock::now() < moment) {
    }
    stop(load);
    host_.poison_tails();
    end_of_all(load);
    ASSERT_TRUE(host_.are_tails_poisoned());
  }
}

TEST_F(SharedLoadTest, C4_AHelperThatNeverComesBackCostsItsLoadAndNoOther) {
  use_workers(2);
  const auto stuck = make_shared_load();
  const auto stuck_source = adapter_.source;
  stuck_source->gate.close();
  start(stuck);
  stuck_source->gate.wait_for_begun(2);
  clock_->advance(std::chrono::seconds(10));
  locked([&] { workers_->expire(); });
  EXPECT_TRUE(stuck->is_over());
  const auto idle = locked([&] { return helpers_->num_idle(); });
  EXPECT_EQ(idle, kReaders - 2);

  renew_adapter();
  const auto next = make_shared_load();
  start(next);
  EXPECT_EQ(end_of(next), nullptr);
  EXPECT_TRUE(is_right(host_));
  stuck_source->gate.open();
  EXPECT_TRUE(holds<AdapterLoadTimeout>(end_of_all(stuck)));
}

// One of the two readers is stuck, the other one has read all the rest: the load waits until its time
// is up, whichever of them it is.
TEST_F(SharedLoadTest, C4_OnePieceThatNeverEndsIsTheTimeOutOfItsLoad) {
  for (int round = 0; round < 10; ++round) {
    renew_adapter();
    use_workers(2);
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    start(load);
    adapter_.source->gate.wait_for_begun(2);
    let_read(0, 1);
    let_read(2, kManyChunks);
    while (adapter_.source->reads <
           static_cast<int>(kManyChunks - SharedReading::kChunksPerPiece)) {
      std::this_thread::yield();
    }
    EXPECT_FALSE(locked([&] { return load->is_finished(); }));
    clock_->advance(std::chrono::seconds(10));
    locked([&] { workers_->expire(); });
    EXPECT_TRUE(load->is_over());
    host_.poison();
    EXPECT_TRUE(holds<AdapterLoadTimeout>(end_of_all(load)));
    EXPECT_TRUE(host_.are_poisoned());
  }
}

TEST_F(SharedLoadTest, AHelperThatCannotOpenTheSourceIsNotMissed) {
  for (int round = 0; round < 10; ++round) {
    renew_adapter();
    host_.poison();
    use_workers(2);
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    start(load);
    adapter_.source->gate.wait_for_begun(1);  // the load's own reader has opened it
    adapter_.source->fail_open = true;        // for its helper, unless that was faster
    EXPECT_EQ(end_of_all(load), nullptr);
    EXPECT_TRUE(is_right(host_));
  }
}

TEST_F(SharedLoadTest, ALoadThatIsStoppedCallsNobody) {
  const auto use = std::make_shared<testing_support::TestUse>();
  const auto waiting = make_load(host_.target({use}), std::nullopt, {workers_, helpers_});
  start(waiting);
  use->looks.wait_for_begun(1);
  stop(waiting);
  use->over = true;
  EXPECT_TRUE(holds<JobStopped>(end_of_all(waiting)));
  EXPECT_EQ(adapter_.source->opens, 1);
  EXPECT_EQ(adapter_.source->reads, 0);
}

TEST_F(SharedLoadTest, AFailureOfAnyReadIsTheLoadsAndARetryWorks) {
  for (std::size_t number = 0; number < kManyChunks; ++number) {
    SCOPED_TRACE(number);
    host_.poison();
    adapter_.source->fail_read_after = static_cast<int>(number);
    const auto load = make_shared_load();
    start(load);
    EXPECT_TRUE(holds<AdapterReadError>(end_of(load)));
    EXPECT_EQ(adapter_.source->fail_read_after, FakeSource::kNever) << "it must have fired";
    host_.poison();  // nobody writes any more, though helpers may be about
    wait_for_helpers();
    EXPECT_TRUE(host_.are_poisoned());
    const auto again = make_shared_load();
    start(again);
    EXPECT_EQ(end_of_all(again), nullptr);
    EXPECT_TRUE(is_right(host_));
  }
}

TEST_F(SharedLoadTest, AHelperFindsOutThatItsFileChanged) {
  const auto load = start_up_to_read(0);
  adapter_.source->fail_finish = true;
  EXPECT_TRUE(holds<AdapterSourceChangedError>(end_of_all(load)));
}

TEST_F(SharedLoadTest, ADeviceMayBeAddedDroppedAndAddedAgainAtAnyMoment) {
  std::mt19937 rng(1);
  std::array<int, 2> seen{};
  for (int round = 0; round < std::max(num_steps(300), 30); ++round) {
    renew_adapter();
    const auto load = start_up_to_read(rng() % SharedReading::kChunksPerPiece);
    let_read(0, rng() % kManyChunks);  // some more, while the device is added
    const bool added = add_device(load, on_device_.target());
    adapter_.source->gate.open();
    for (const int until = static_cast<int>(rng() % kManyChunks); adapter_.source->reads < until;) {
    }
    bool filled = added;
    if (rng() % 2 == 0) {
      load->drop_device();
      on_device_.poison();
      filled = add_device(load, on_device_.target());  // again, if there is time left
    }
    ASSERT_EQ(end_of_all(load), nullptr);
    ASSERT_TRUE(is_right(host_));
    ASSERT_TRUE(filled ? is_right(on_device_) : on_device_.are_poisoned());
    ++seen[filled ? 1 : 0];
  }
  EXPECT_GT(std::ranges::min(seen), 0);
}

TEST_F(SharedLoadTest, AHelperThatComesLateReadsNothing) {
  const auto load = make_load(host_.target());
  run(load);
  std::vector<std::byte> scratch(kChunkBytes);
  load->help(scratch, 1);
  EXPECT_EQ(adapter_.source->opens, 1);
}

class SharedReadingTest : public testing_support::LoadFixture {
 protected:
  SharedReadingTest() { use_adapter(2048, 2048, 32); }

  static std::exception_ptr error(const char* text) {
    return std::make_exception_ptr(std::runtime_error(text));
  }
};

TEST_F(SharedReadingTest, ReportsTheFirstPieceThatFailedWhoeverWasFaster) {
  SharedReading reading(config_, adapter_.plan, layout_, false, kChunkBytes);
  ASSERT_EQ(reading.pieces().size(), 4U);
  EXPECT_EQ(reading.num_chunks(), 32U);
  for (std::size_t piece = 0; piece < 3; ++piece) {
    EXPECT_EQ(reading.take(), piece);
  }
  reading.end(2, error("the third"));
  EXPECT_EQ(reading.take(), std::nullopt) << "nothing more is read";
  reading.stop_waiting();
  EXPECT_FALSE(reading.wait_for_taken());
  reading.end(0, ScatterPlan::Outcome{});
  reading.end(1, error("the second"));
  EXPECT_TRUE(reading.wait_for_taken());
  try {
    reading.outcome();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& thrown) {
    EXPECT_STREQ(thrown.what(), "the second");
  }
}

}  // namespace
}  // namespace pagedlora::internal
