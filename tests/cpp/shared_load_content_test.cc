// What several readers of one load bring in (design 3.3: C4; 3.4: L6): the bytes and the checksum that one
// reader finds, also of slices, and also beside other loads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "random_seeds.h"
#include "shared_load_fixture.h"

namespace pagedlora::internal {
namespace {

using testing_support::FakeSource;
using testing_support::holds;
using testing_support::num_steps;
using testing_support::Pages;
using testing_support::SharedLoadTest;
using testing_support::TestAdapter;

class SharedLoadContentTest : public SharedLoadTest {
 protected:
  static constexpr std::size_t kPieceBytes = SharedReading::kChunksPerPiece * kChunkBytes;

  // Nobody reads meanwhile.
  void flip_bit(std::size_t at) { adapter_.source->bytes.at(at) ^= std::byte{0x10}; }
  void exchange_pieces(std::size_t first, std::size_t second) {
    const auto at = [this](std::size_t piece) {
      return adapter_.source->bytes.begin() + static_cast<std::ptrdiff_t>(piece * kPieceBytes);
    };
    std::swap_ranges(at(first), at(first + 1), at(second));
  }
  std::exception_ptr error_of_one_reader(std::uint64_t checksum) {
    try {
      run(make_load(host_.target(), checksum));
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  std::exception_ptr error_of_many_readers(std::uint64_t checksum) {
    const std::size_t begun = adapter_.source->gate.num_begun();
    const auto load = make_shared_load(checksum);
    adapter_.source->gate.close();
    start(load);
    adapter_.source->gate.wait_for_begun(begun + kReaders);
    return end_of_all(load);
  }

  // Without pieces.
  ScatterPlan::Outcome read_as_a_whole(const Pages& pages) const {
    std::vector<std::byte> chunk(kChunkBytes);
    return ScatterPlan(*config_, *adapter_.plan, *layout_)
        .execute(*adapter_.plan->source()->open(), config_->dtype(), chunk, pages.own()->view(),
                 nullptr);
  }

  // One module of 8192 inputs and 4096 outputs, of which this shard has some, cut out of whole A and B.
  void use_slice(FeatureRange in, FeatureRange out) {
    constexpr std::uint32_t kIn = 8192;
    constexpr std::uint32_t kOut = 4096;
    constexpr std::uint32_t kRank = 32;
    constexpr std::uint32_t kStoredRank = 40;
    std::vector<float> weights(std::size_t{kRank} * kIn + std::size_t{kOut} * kStoredRank);
    std::iota(weights.begin(), weights.end(), 1.0F);
    const auto raw = std::as_bytes(std::span(weights));
    const auto b_offset =
        (std::uint64_t{kRank} * kIn + std::uint64_t{out.offset} * kStoredRank + 5);
    const PlannedRow row{ModuleIndex{0},
                         kRank,
                         {in.offset * sizeof(float), Dtype::float32, kIn},
                         {b_offset * sizeof(float), Dtype::float32, kStoredRank},
                         1.0F,
                         in,
                         out};
    config_ = testing_support::float32_model({{kIn, kOut}});
    adapter_.source = std::make_shared<FakeSource>(std::vector<std::byte>(raw.begin(), raw.end()));
    adapter_.plan =
        std::make_shared<const AdapterPlan>(*config_, std::vector{row}, adapter_.source);
    lay_out(kIn);
  }
};

TEST_F(SharedLoadContentTest, L6_ABitThatFlippedInAnyPieceIsFoundAsByOneReader) {
  const std::uint64_t checksum = run(make_load(host_.target()));
  const std::size_t num_pieces = adapter_.source->bytes.size() / kPieceBytes;
  ASSERT_EQ(num_pieces, kReaders);
  for (std::size_t piece = 0; piece < num_pieces; ++piece) {
    for (const std::size_t at : {piece * kPieceBytes, (piece + 1) * kPieceBytes - 1}) {
      SCOPED_TRACE(at);
      flip_bit(at);
      EXPECT_TRUE(holds<AdapterSourceChangedError>(error_of_one_reader(checksum)));
      EXPECT_TRUE(holds<AdapterSourceChangedError>(error_of_many_readers(checksum)));
      flip_bit(at);
      EXPECT_EQ(error_of_many_readers(checksum), nullptr);
      EXPECT_TRUE(is_right(host_));
    }
  }
}

TEST_F(SharedLoadContentTest, L6_PiecesThatChangedPlacesAreFoundAsByOneReader) {
  const std::uint64_t checksum = run(make_load(host_.target()));
  exchange_pieces(1, 2);
  EXPECT_TRUE(holds<AdapterSourceChangedError>(error_of_one_reader(checksum)));
  EXPECT_TRUE(holds<AdapterSourceChangedError>(error_of_many_readers(checksum)));
}

// Rows of A that are longer than a chunk, so that pieces begin inside of them; or shorter.
TEST_F(SharedLoadContentTest, ASliceFillsThePagesAsOneReaderDoes) {
  const std::array<std::pair<FeatureRange, FeatureRange>, 4> slices{{
      {{0, 8192}, {1024, 2048}},
      {{2048, 4096}, {0, 4096}},
      {{1000, 6001}, {1001, 2047}},
      {{7, 1531}, {3, 4093}},
  }};
  for (const auto& [in, out] : slices) {
    SCOPED_TRACE(in.length);
    use_slice(in, out);
    const Pages expected(layout_, 1);
    const ScatterPlan::Outcome outcome = read_as_a_whole(expected);
    const int num_reads = adapter_.source->reads.exchange(0);
    const auto load = start_up_to_read(0);
    ASSERT_EQ(end_of_all(load), nullptr);
    EXPECT_TRUE(host_.hold_the_same_as(expected));
    EXPECT_FALSE(host_.are_poisoned());
    EXPECT_EQ(load->source_bytes(), outcome.source_bytes);
    EXPECT_EQ(adapter_.source->reads, num_reads);
    EXPECT_EQ(load->checksum(), run(make_load(expected.target())));
  }
}

// The first takes as many helpers as it has pieces beside its own, and hangs. The second has what is
// left.
TEST_F(SharedLoadContentTest, C4_TwoLoadsShareTheHelpersAndNeitherWaitsForTheOther) {
  for (const std::uint32_t num_pieces : {2U, 3U, 4U}) {
    SCOPED_TRACE(num_pieces);
    use_workers(kReaders);
    use_adapter(2048, 2048, 8 * num_pieces);
    const TestAdapter first_adapter = adapter_;
    const Pages first_pages = host_;
    const auto first = start_with_readers(num_pieces);
    renew_adapter();
    const std::size_t idle = std::min(kReaders - 2, kReaders - num_pieces);
    const auto second = start_with_readers(1 + idle);
    EXPECT_EQ(adapter_.source->live_readers, static_cast<int>(1 + idle));
    EXPECT_EQ(end_of(second), nullptr);
    EXPECT_TRUE(is_right(host_));
    EXPECT_FALSE(locked([&] { return first->is_finished(); }));
    EXPECT_EQ(first_adapter.source->live_readers, static_cast<int>(num_pieces));
    adapter_ = first_adapter;
    EXPECT_EQ(end_of_all(first), nullptr);
    EXPECT_TRUE(is_right(first_pages));
  }
}

TEST_F(SharedLoadContentTest, AsManyLoadsAtATimeAsThereAreWorkersAreAllRight) {
  for (int round = 0; round < std::max(num_steps(100), 10); ++round) {
    std::vector<TestAdapter> adapters;
    std::vector<Pages> pages;
    std::vector<std::shared_ptr<SourceLoad>> loads;
    for (std::size_t i = 0; i < kReaders; ++i) {
      renew_adapter();
      adapters.push_back(adapter_);
      pages.push_back(host_);
      loads.push_back(make_shared_load());
    }
    for (const auto& load : loads) {
      start(load);
    }
    for (std::size_t i = 0; i < kReaders; ++i) {
      ASSERT_EQ(end_of(loads[i]), nullptr);
      adapter_ = adapters[i];
      ASSERT_TRUE(is_right(pages[i]));
    }
    wait_for_helpers();
  }
}

TEST_F(SharedLoadContentTest, C4_ALoadThatWaitsForItsHelperLeavesWhenItIsStopped) {
  use_workers(2);
  const auto readers = number_readers();
  readers->gates[0].close();
  readers->gates[1].close();
  const auto load = make_shared_load();
  start(load);
  readers->gates[1].wait_for_begun(1);
  readers->gates[0].open();
  while (adapter_.source->reads < static_cast<int>(kManyChunks - SharedReading::kChunksPerPiece)) {
    std::this_thread::yield();
  }
  stop(load);
  EXPECT_TRUE(holds<JobStopped>(end_of(load))) << "its thread is out";
  EXPECT_EQ(locked([&] { return helpers_->num_idle(); }), kReaders - 2)
      << "and the helper's is not";
  host_.poison();
  readers->gates[1].open();
  wait_for_helpers();
  EXPECT_TRUE(host_.are_poisoned());
}

}  // namespace
}  // namespace pagedlora::internal
