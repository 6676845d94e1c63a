// The tables that LoRA kernels read: what is written when, that the reported changes are all of
// them, and that nothing moves under a captured launch.
#include "pagedlora/cuda/lora_tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/lora_kernel_fixture.h"
#include "pagedlora/cuda/range_allocator.h"
#include "pagedlora/errors.h"
#include "random_seeds.h"

namespace pagedlora::cuda {
namespace {

using testing_support::Adapter;
using testing_support::apply_on_host;
using testing_support::config_of;
using testing_support::kModule;
using testing_support::LaunchOptions;
using testing_support::Matrix;
using testing_support::num_wrong_on_device;
using testing_support::Rng;
using testing_support::roomy;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::unowned;

using Change = LoraTables::Change;
using Segments = std::vector<LoraTables::Segment>;

std::size_t bytes_of(const std::vector<Change>& changes) {
  std::size_t bytes = 0;
  for (const Change& change : changes) {
    bytes += change.bytes;
  }
  return bytes;
}

class LoraTablesTest : public ::testing::Test {
 protected:
  std::unique_ptr<Adapter> adapter(std::uint32_t rank, Dtype dtype = Dtype::float32) {
    return std::make_unique<Adapter>(config_, std::vector<RowShape>{{kModule, rank}}, dtype, 0,
                                     rng_);
  }
  static std::uint32_t add(LoraTables& tables, Adapter& adapter) {
    return tables.try_add_task(adapter.pages(), unowned(adapter.layout())).value();
  }

  Rng rng_{3};
  LoraModelConfig config_ = config_of({{24, 40}, {8, 8}});
};

TEST_F(LoraTablesTest, WhatWasNeverWrittenIsZeroAndNotUploaded) {
  LoraTables tables(roomy(8), Dtype::float32);
  EXPECT_TRUE(tables.take_changes().empty());
  EXPECT_TRUE(std::ranges::all_of(tables.bytes(), [](std::byte b) { return b == std::byte{}; }));
}

TEST_F(LoraTablesTest, AStepWritesTheBatchOnlyAndInOnePiece) {
  LoraTables tables(roomy(64), Dtype::float32);
  const auto a = adapter(12);
  const auto b = adapter(3);
  const std::uint32_t slot_a = add(tables, *a);
  const std::uint32_t slot_b = add(tables, *b);
  tables.take_changes();
  tables.set_batch(Segments{{slot_a, 1}, {std::nullopt, 5}, {slot_b, 2}}, 1);
  const std::vector<Change> changes = tables.take_changes();
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_EQ(changes[0], (Change{0, 16 + 3 * 16 + 3 * 4}));  // header, tiles, order
  tables.set_batch(Segments{{slot_a, 1}, {std::nullopt, 5}, {slot_b, 2}}, 1);
  EXPECT_TRUE(tables.take_changes().empty()) << "the same batch again";
}

TEST_F(LoraTablesTest, ALayoutIsWrittenOnceForAllOfItsTasks) {
  LoraTables tables(roomy(8), Dtype::float32);
  const auto a = adapter(12);
  tables.take_changes();
  add(tables, *a);
  const std::size_t first = bytes_of(tables.take_changes());
  EXPECT_GT(first, LoraTables::layout_bytes(a->layout()) / 2);
  TaskPages moved = a->pages();
  std::vector<PageId> pages(moved.pages, moved.pages + a->layout().num_pages());
  for (PageId& page : pages) {
    page.value += 100;
  }
  const std::vector<float> scales(a->layout().rows().size(), 7.0F);
  moved.pages = pages.data();
  moved.scales = scales.data();
  const std::uint32_t slot = tables.try_add_task(moved, unowned(a->layout())).value();
  EXPECT_LE(bytes_of(tables.take_changes()),
            sizeof(LoraTaskEntry) + LoraTables::residency_bytes(a->layout()));
  tables.remove_task(slot);
  EXPECT_TRUE(tables.take_changes().empty());
  tables.try_add_task(moved, unowned(a->layout()));
  EXPECT_TRUE(tables.take_changes().empty()) << "the same residency in the same place";
}

TEST_F(LoraTablesTest, TokensOfOneTaskShareTilesWhereverTheyAre) {
  LoraTables tables(roomy(64), Dtype::float32);
  const auto a = adapter(12);
  const auto b = adapter(3);
  const std::uint32_t slot_a = add(tables, *a);
  const std::uint32_t slot_b = add(tables, *b);
  const Segments segments{{slot_b, 1}, {slot_a, 2}, {std::nullopt, 1}, {slot_b, 3}, {slot_a, 3}};
  tables.set_batch(segments, 1);
  EXPECT_EQ(tables.num_tiles(), 9U);
  tables.set_batch(segments, 2);
  EXPECT_EQ(tables.num_tiles(), 2U + 3U);
  tables.set_batch(segments, 64);
  EXPECT_EQ(tables.num_tiles(), 2U);
  LoraHeader header;
  std::memcpy(&header, tables.bytes().data(), sizeof(header));
  std::vector<std::uint32_t> order(header.num_tokens);
  std::memcpy(order.data(), tables.bytes().data() + header.order, order.size() * 4);
  EXPECT_EQ(order, (std::vector<std::uint32_t>{0, 4, 5, 6, 1, 2, 7, 8, 9}));
}

TEST_F(LoraTablesTest, RefusalsChangeNothing) {
  LoraTables tables({4, 2, 2, 4096, 4096}, Dtype::float32);
  const auto a = adapter(12);
  const std::uint32_t slot = add(tables, *a);
  tables.set_batch(Segments{{slot, 4}}, 1);
  tables.take_changes();
  const std::vector<std::byte> before(tables.bytes().begin(), tables.bytes().end());
  const auto refused = [&](const Segments& segments, std::uint32_t tokens_per_tile) {
    EXPECT_THROW(tables.set_batch(segments, tokens_per_tile), InvalidArgumentError);
  };
  refused({{slot, 5}}, 1);
  refused({{slot, 2}, {std::nullopt, 9}, {slot, 3}}, 1);
  refused({{slot, 1}}, 0);
  refused({{1U, 1}}, 1);  // free
  refused({{2U, 1}}, 1);  // there is no such slot
  EXPECT_THROW(tables.remove_task(1), InvalidArgumentError);
  EXPECT_THROW(tables.remove_task(2), InvalidArgumentError);
  const auto wide = adapter(17);  // three blocks
  EXPECT_THROW(add(tables, *wide), InvalidArgumentError);
  const auto other = adapter(8, Dtype::bfloat16);
  EXPECT_THROW(add(tables, *other), InvalidArgumentError);
  EXPECT_TRUE(tables.take_changes().empty());
  EXPECT_TRUE(std::ranges::equal(tables.bytes(), before));
  EXPECT_EQ(tables.num_tiles(), 4U);
  EXPECT_THROW(LoraTables({0, 1, 1, 1, 1}, Dtype::float32), InvalidArgumentError);
  EXPECT_THROW(LoraTables({1, 1, 1, std::size_t{5} << 30, 1}, Dtype::float32),
               InvalidArgumentError);
}

TEST_F(LoraTablesTest, WithoutRoomThereIsNoSlotUntilSomethingLeaves) {
  const auto a = adapter(12);
  const auto b = adapter(9);
  const std::size_t residency = LoraTables::residency_bytes(a->layout());
  const std::size_t layout = LoraTables::layout_bytes(a->layout());
  const auto refuses = [&](LoraTableCapacity capacity, Adapter& second) {
    LoraTables tables(capacity, Dtype::float32);
    const std::uint32_t slot = add(tables, *a);
    tables.take_changes();
    EXPECT_FALSE(tables.try_add_task(second.pages(), unowned(second.layout())));
    EXPECT_TRUE(tables.take_changes().empty());
    tables.remove_task(slot);
    EXPECT_TRUE(tables.try_add_task(second.pages(), unowned(second.layout())));
  };
  refuses({4, 1, 4, 1U << 20, 1U << 20}, *a);        // slots
  refuses({4, 9, 4, 1U << 20, residency + 15}, *a);  // pages and scales
  refuses({4, 9, 4, layout + 15, 1U << 20}, *b);     // layouts: the idle one makes room
}

// A device that is only told what changed has the same bytes, and a launch that was captured
// before all of it (same view, same grid) computes with what is there now.
TEST_F(LoraTablesTest, WhatWasCapturedStaysRightWhileTasksComeAndGo) {
  for (const std::uint32_t seed : seeds(8)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    std::vector<std::unique_ptr<Adapter>> adapters;
    for (std::uint32_t i = 0; i < 6; ++i) {
      adapters.push_back(adapter(1 + static_cast<std::uint32_t>(rng() % 20)));
    }
    // Room for about three of the six.
    LoraTables tables({10, 3, 3, 1'000, 200}, Dtype::float32);
    const std::byte* base = tables.bytes().data();
    std::vector<std::byte> device(tables.bytes().size());
    std::map<std::uint32_t, Adapter*> resident;
    int refusals = 0;
    for (int step = 0; step < 40; ++step) {
      Adapter& next = *adapters[rng() % adapters.size()];
      const auto slot = tables.try_add_task(next.pages(), unowned(next.layout()));
      refusals += !slot;
      if (slot) {
        resident[*slot] = &next;
      }
      if (resident.empty() || (rng() % 3 == 0 && resident.size() > 1)) {
        tables.remove_task(resident.begin()->first);
        resident.erase(resident.begin());
      }
      Segments segments;
      std::vector<Adapter*> of_token;
      for (const auto& [at, who] : resident) {
        const auto tokens = static_cast<std::uint32_t>(rng() % 4);
        segments.push_back({at, tokens});
        of_token.insert(of_token.end(), tokens, who);
      }
      tables.set_batch(segments, 1);
      for (const Change& change : tables.take_changes()) {
        std::memcpy(device.data() + change.offset, base + change.offset, change.bytes);
      }
      ASSERT_TRUE(std::ranges::equal(tables.bytes(), device));
      ASSERT_EQ(tables.bytes().data(), base);
      const auto count = static_cast<std::uint32_t>(of_token.size());
      Matrix x = Matrix::random(count, 24, Dtype::float32, rng);
      const Matrix before = Matrix::random(count, 40, Dtype::float32, rng);
      Matrix after = before;
      apply_on_host(tables, kModule, x, after, nullptr, {1, 10, nullptr});
      for (std::uint32_t token = 0; token < count; ++token) {
        const auto row_of = [&](const Matrix& matrix) {
          return matrix.pick({token}, Dtype::float32, 0);
        };
        ASSERT_EQ(num_wrong_on_device(*of_token[token], kModule, row_of(x), row_of(before),
                                      row_of(after)),
                  0);
      }
    }
    EXPECT_GT(refusals, 0);
  }
}

TEST_F(LoraTablesTest, AnEmptyBatchAndATaskWithoutTheModuleChangeNothing) {
  LoraTables tables(roomy(8), Dtype::float32);
  Adapter elsewhere(config_, {{ModuleIndex{1}, 4}}, Dtype::float32, 0, rng_);
  const std::uint32_t slot = add(tables, elsewhere);
  Matrix x = Matrix::random(3, 24, Dtype::float32, rng_);
  const Matrix before = Matrix::random(3, 40, Dtype::float32, rng_);
  for (const Segments& segments :
       {Segments{}, Segments{{std::nullopt, 3}}, Segments{{slot, 0}}, Segments{{slot, 3}}}) {
    Matrix after = before;
    tables.set_batch(segments, 1);
    apply_on_host(tables, kModule, x, after, nullptr, {1, 8, nullptr});
    EXPECT_EQ(after.bytes(), before.bytes());
  }
  tables.set_batch(Segments{{slot, 3}}, 1);
  Matrix after = before;
  apply_on_host(tables, ModuleIndex{2}, x, after, nullptr, {1, 8, nullptr});  // of no layout here
  EXPECT_EQ(after.bytes(), before.bytes());
}

// Against a map of bytes.
TEST(RangeAllocatorTest, HandsOutTheLowestFreePlaceAndMergesWhatComesBack) {
  for (const std::uint32_t seed : seeds(20)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    RangeAllocator room(64, 1'024);
    std::vector<bool> used(64, false);  // units of 16 bytes
    std::map<std::size_t, std::size_t> claims;
    for (int step = 0; step < 300; ++step) {
      if (rng() % 2 == 0 && !claims.empty()) {
        const auto claim =
            std::next(claims.begin(), static_cast<std::ptrdiff_t>(rng() % claims.size()));
        room.release(claim->first, claim->second);
        const std::size_t units = std::max<std::size_t>((claim->second + 15) / 16, 1);
        std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(claim->first / 16 - 4), units,
                    false);
        claims.erase(claim);
      }
      const std::size_t bytes = rng() % 300;
      const std::size_t units = std::max<std::size_t>((bytes + 15) / 16, 1);
      const auto place = std::search_n(used.begin(), used.end(), static_cast<int>(units), false);
      const std::optional<std::size_t> offset = room.try_claim(bytes);
      ASSERT_EQ(offset.has_value(), place != used.end());
      if (offset) {
        ASSERT_EQ(*offset, 64 + 16 * static_cast<std::size_t>(place - used.begin()));
        std::fill_n(place, units, true);
        claims[*offset] = bytes;
      }
      ASSERT_EQ(room.free_bytes(), 16 * static_cast<std::size_t>(std::ranges::count(used, false)));
    }
  }
}

}  // namespace
}  // namespace pagedlora::cuda
