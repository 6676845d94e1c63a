// The jobs that fill a task's pages, over a source that can be held back: for tests of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora::testing_support {

using internal::FillTarget;
using internal::Job;
using internal::JobBoard;
using internal::JobPool;
using internal::JobStopped;
using internal::LoadHelpers;
using internal::OwnTaskPages;
using internal::SourceLoad;

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

  // Whether pages of the same layout and the same order hold the same bytes.
  bool hold_the_same_as(const Pages& others) const { return *arena_ == *others.arena_; }

  // The last bytes of each page alone, which takes so little time that a write under way comes later.
  void poison_tails() {
    for_each_tail([](std::span<std::byte> tail) { std::ranges::fill(tail, kPoison); });
  }
  bool are_tails_poisoned() const {
    bool all = true;
    for_each_tail([&](std::span<std::byte> tail) {
      all &= std::ranges::all_of(tail, [](std::byte byte) { return byte == kPoison; });
    });
    return all;
  }

 private:
  static constexpr std::byte kPoison{0xEE};
  static constexpr std::size_t kTailBytes = 64;

  void for_each_tail(auto visit) const {
    const std::size_t page_bytes = own_->view().layout->params().page_bytes;
    for (std::size_t end = page_bytes; end <= arena_->size(); end += page_bytes) {
      visit(std::span(arena_->data() + end - kTailBytes, kTailBytes));
    }
  }

  std::shared_ptr<std::vector<std::byte>> arena_ = std::make_shared<std::vector<std::byte>>();
  std::shared_ptr<const OwnTaskPages> own_;
};

class LoadFixture : public ::testing::Test {
 protected:
  LoadFixture() { use_adapter(512, 512, 32); }

  // A model of one module and its adapter, read in kChunks chunks at first; and poisoned pages.
  void use_adapter(std::int64_t in, std::int64_t out, std::uint32_t rank) {
    config_ = float32_model({{in, out}});
    adapter_ = make_adapter(*config_, {rank}, 1);
    lay_out(in);
  }
  // Of the plan in adapter_: new pages, each for a part of so many inputs.
  void lay_out(std::int64_t in) {
    const std::size_t part_bytes = kMaxBlockRanks * sizeof(float) * static_cast<std::size_t>(in);
    layout_ = std::make_shared<const Layout>(
        *config_, adapter_.plan->row_shapes(),
        LayoutParams{(part_bytes + kSlotBytes - 1) / kSlotBytes * kSlotBytes, sizeof(float), 0});
    host_ = Pages(layout_, 1);
    on_device_ = Pages(layout_, 2);
  }
  std::shared_ptr<SourceLoad> make_load(const FillTarget& target,
                                        std::optional<std::uint64_t> checksum = std::nullopt,
                                        LoadHelpers helpers = {}) {
    return std::make_shared<SourceLoad>(board_, TaskId{1},
                                        SourceLoad::What{config_, adapter_.plan, layout_, checksum},
                                        target, std::move(helpers));
  }
  auto locked(auto call) {
    const std::scoped_lock lock(board_->mutex);
    return call();
  }
  ~LoadFixture() override {
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

}  // namespace pagedlora::testing_support
