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

#include "fake_device.h"
#include "pagedlora/errors.h"
#include "peft_fixture.h"
#include "random_seeds.h"
#include "thrown_by.h"

namespace pagedlora::internal {
namespace {

using testing_support::float32_model;
using testing_support::holds;
using testing_support::holds_adapter;
using testing_support::make_adapter;
using testing_support::num_steps;
using testing_support::TestAdapter;

struct TestUse final : PageUse {
  bool is_over() const override {
    looks.pass();
    return over;
  }
  std::atomic<bool> over{false};
  mutable fake::Gate looks;  // open: it only counts
};

// Pages of one task, scattered over an arena of their own that is poisoned.
class Pages {
 public:
  Pages() = default;
  Pages(const std::shared_ptr<const Layout>& layout, unsigned seed) {
    const std::size_t page_bytes = layout->params().page_bytes;
    std::vector<PageId> ids;
    for (std::uint32_t i = 0; i < 2 * layout->num_pages(); ++i) {
      ids.push_back(PageId{i});
    }
    std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
    arena_->resize(ids.size() * page_bytes, kPoison);
    own_ = std::make_shared<const OwnTaskPages>(
        TaskPages{layout.get(), ids.data(), nullptr, arena_->data(), page_bytes}, layout, arena_);
  }

  const std::shared_ptr<const OwnTaskPages>& own() const { return own_; }
  FillTarget target(PageUses waits = {}) const { return {own_, std::move(waits)}; }
  void poison() { std::ranges::fill(*arena_, kPoison); }
  bool are_poisoned() const {
    return std::ranges::all_of(*arena_, [](std::byte byte) { return byte == kPoison; });
  }

 private:
  static constexpr std::byte kPoison{0xEE};

  std::shared_ptr<std::vector<std::byte>> arena_ = std::make_shared<std::vector<std::byte>>();
  std::shared_ptr<const OwnTaskPages> own_;
};

class LoadJobsTest : public ::testing::Test {
 protected:
  LoadJobsTest() { use_adapter(512, 512, 32); }

  // A model of one module and its adapter, read in kChunks chunks at first; and poisoned pages.
  void use_adapter(std::int64_t in, std::int64_t out, std::uint32_t rank) {
    config_ = float32_model({{in, out}});
    adapter_ = make_adapter(*config_, {rank}, 1);
    const std::size_t part_bytes = kMaxBlockRanks * sizeof(float) * static_cast<std::size_t>(in);
    layout_ = std::make_shared<const Layout>(
        *config_, adapter_.plan->row_shapes(),
        LayoutParams{(part_bytes + kSlotBytes - 1) / kSlotBytes * kSlotBytes, sizeof(float), 0});
    host_ = Pages(layout_, 1);
    on_device_ = Pages(layout_, 2);
  }
  std::shared_ptr<SourceLoad> make_load(const FillTarget& target,
                                        std::optional<std::uint64_t> checksum = std::nullopt) {
    return std::make_shared<SourceLoad>(
        board_, TaskId{1}, SourceLoad::What{config_, adapter_.plan, layout_, checksum}, target);
  }
  auto locked(auto call) {
    const std::scoped_lock lock(board_->mutex);
    return call();
  }
  ~LoadJobsTest() override {
    adapter_.source->gate.open();
    device_->copies.open();
    locked([&] { board_->finished.clear(); });  // jobs share the board
  }
  void start(const std::shared_ptr<Job>& job) {
    locked([&] { pool_.submit(job); });
  }
  // Starts it and waits until its source is asked for chunk `chunk`: the others are written.
  void start_up_to_chunk(const std::shared_ptr<SourceLoad>& load, std::size_t chunk) {
    adapter_.source->gate.close();
    let_read(0, chunk);
    start(load);
    adapter_.source->gate.wait_for_begun(chunk + 1);
  }
  void let_read(std::size_t begin, std::size_t end) {
    for (; begin < end; ++begin) {
      adapter_.source->gate.let_pass(begin);
    }
  }
  void stop(const std::shared_ptr<Job>& job) {
    locked([&] { job->stop(); });
  }
  bool add_device(const std::shared_ptr<SourceLoad>& load, const FillTarget& target) {
    return locked([&] { return load->add_device(target); });
  }
  // Its error, once its thread has left it.
  std::exception_ptr end_of(const std::shared_ptr<Job>& job) {
    adapter_.source->gate.open();
    device_->copies.open();
    std::unique_lock lock(board_->mutex);
    EXPECT_TRUE(board_->changed.wait_for(lock, std::chrono::seconds(60),
                                         [&] { return job->is_finished() && job->is_over(); }));
    return job->error();
  }
  static std::uint64_t run(const std::shared_ptr<SourceLoad>& load) {
    std::vector<std::byte> scratch(kChunkBytes);
    load->run(scratch);
    return load->checksum();
  }
  // What every job does with the uses of the pages that it fills; `make` gets the target.
  void expect_to_wait_for_uses(const Pages& pages, auto make) {
    const std::array uses{std::make_shared<TestUse>(), std::make_shared<TestUse>()};
    const auto job = make(pages.target({uses[0], uses[1]}));
    start(job);
    for (const auto& use : uses) {
      use->looks.wait_for_begun(3);
      EXPECT_TRUE(pages.are_poisoned());
      EXPECT_FALSE(job->is_over());
      use->over = true;
    }
    EXPECT_EQ(end_of(job), nullptr);
    EXPECT_TRUE(is_right(pages));
  }
  void expect_to_be_over_when_stopped_before_it_writes(const Pages& pages, auto make) {
    const auto use = std::make_shared<TestUse>();
    const auto waiting = make(pages.target({use}));
    const auto queued = make(pages.target());
    start(waiting);
    start(queued);
    use->looks.wait_for_begun(1);
    for (const auto& job : {queued, waiting}) {
      EXPECT_FALSE(job->is_over());
      stop(job);
      EXPECT_TRUE(job->is_over());
    }
    EXPECT_TRUE(holds<JobStopped>(end_of(queued)) && holds<JobStopped>(end_of(waiting)));
    EXPECT_TRUE(pages.are_poisoned());
  }
  bool is_right(const Pages& pages) const {
    TaskPages view = pages.own()->view();
    view.scales = adapter_.plan->scales().data();
    return holds_adapter(view, *config_, adapter_);
  }

  static constexpr std::size_t kChunks = 8;
  static constexpr std::size_t kChunkBytes = ScatterPlan::kMinChunkBytes;
  std::shared_ptr<const LoraModelConfig> config_;
  TestAdapter adapter_;
  std::shared_ptr<const Layout> layout_;
  const std::shared_ptr<JobBoard> board_ = std::make_shared<JobBoard>();
  const std::shared_ptr<fake::Device> device_ = std::make_shared<fake::Device>();
  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  Pages host_;
  Pages on_device_;
  JobPool pool_{board_, clock_, {1, 1, kChunkBytes, std::chrono::seconds(10)}};
};
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
