// Rules of design 3.1: blocks of at most 8 ranks, parts inside one page, first fit in layer order.
#include "pagedlora/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/layout_cache.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::seed_label;
using testing_support::seeds;
using Shapes = std::vector<std::pair<std::int64_t, std::int64_t>>;

LoraModelConfig model_of(const Shapes& in_out, Dtype dtype = Dtype::bfloat16) {
  std::vector<LoraModule> modules;
  for (const auto& [in, out] : in_out) {
    modules.push_back({"module." + std::to_string(modules.size()), -1, -1, in, out});
  }
  return {std::move(modules), dtype, LoraModelConfig::kMaxRank};
}

std::vector<RowShape> every_module(const LoraModelConfig& config, std::uint32_t rank) {
  std::vector<RowShape> rows;
  for (std::uint32_t i = 0; i < config.modules().size(); ++i) {
    rows.push_back({ModuleIndex{i}, rank});
  }
  return rows;
}

std::size_t slots_for(std::size_t bytes) { return (bytes + kSlotBytes - 1) / kSlotBytes; }

std::vector<std::size_t> block_sizes(const Layout& layout, std::uint32_t row) {
  std::vector<std::size_t> sizes;
  for (const Block& block : layout.blocks_of_row(row)) {
    sizes.push_back(block.rank_count);
  }
  return sizes;
}

// The blocks of every row follow each other and add up to its rank.
void expect_blocks_cover_ranks(const Layout& layout) {
  std::size_t num_blocks = 0;
  for (std::uint32_t row = 0; row < layout.rows().size(); ++row) {
    std::uint32_t rank = 0;
    for (const Block& block : layout.blocks_of_row(row)) {
      EXPECT_EQ(block.row, row);
      EXPECT_EQ(block.rank_begin, rank);
      EXPECT_GE(block.rank_count, 1);
      EXPECT_LE(block.rank_count, kMaxBlockRanks);
      rank += block.rank_count;
      ++num_blocks;
    }
    EXPECT_EQ(rank, layout.rows()[row].rank);
  }
  EXPECT_EQ(num_blocks, layout.blocks().size());
}

// The tiles of one matrix of a block follow each other and cover its features.
void expect_tiles_cover(std::span<const Part> parts, std::int64_t features) {
  std::uint32_t end = 0;
  for (const Part& part : parts) {
    EXPECT_EQ(part.begin, end);
    EXPECT_GE(part.length, 1U);
    end = part.begin + part.length;
  }
  EXPECT_EQ(end, features);
}

// First fit written down once more, page by page and without a tree. As it places by counting slots
// up, parts neither overlap nor cross the end of a page.
class NaiveFirstFit {
 public:
  explicit NaiveFirstFit(std::size_t slots_per_page) : slots_per_page_(slots_per_page) {}

  PartLocation place(std::size_t slots) {
    std::size_t page = 0;
    while (page < used_.size() && used_[page] + slots > slots_per_page_) {
      ++page;
    }
    if (page == used_.size()) {
      used_.push_back(0);
    }
    const std::size_t slot = used_[page];
    used_[page] += slots;
    return {static_cast<std::uint32_t>(page), static_cast<std::uint32_t>(slot)};
  }
  std::size_t num_pages() const { return used_.size(); }

 private:
  std::size_t slots_per_page_;
  std::vector<std::size_t> used_;
};

// Everything the header promises about where parts lie.
void expect_sound(const Layout& layout, const LoraModelConfig& config) {
  expect_blocks_cover_ranks(layout);
  const LayoutParams& params = layout.params();
  NaiveFirstFit expected(params.page_bytes / kSlotBytes);
  std::vector<int> users(layout.num_pages() * (params.page_bytes / kSlotBytes), 0);
  std::size_t payload = 0;
  for (const Block& block : layout.blocks()) {
    const LoraModule& module = config.module(layout.rows()[block.row].module);
    expect_tiles_cover(layout.a_parts(block), module.in_features);
    expect_tiles_cover(layout.b_parts(block), module.out_features);
    for (const auto parts : {layout.a_parts(block), layout.b_parts(block)}) {
      for (const Part& part : parts) {
        const std::size_t bytes =
            std::size_t{part.length} * block.rank_count * params.element_bytes;
        payload += bytes;
        ASSERT_LE(bytes, params.max_part_bytes);
        ASSERT_LT(part.at.page, layout.num_pages());
        ASSERT_LE(part.at.slot * kSlotBytes + bytes, params.page_bytes) << "crosses its page";
        const PartLocation first_fit = expected.place(slots_for(bytes));
        ASSERT_EQ(part.at.page, first_fit.page);
        ASSERT_EQ(part.at.slot, first_fit.slot);
        const std::size_t first = part.at.page * (params.page_bytes / kSlotBytes) + part.at.slot;
        for (std::size_t slot = first; slot < first + slots_for(bytes); ++slot) {
          ASSERT_EQ(users[slot]++, 0) << "two parts share a slot";
        }
      }
    }
  }
  EXPECT_EQ(layout.payload_bytes(), payload);
  EXPECT_EQ(layout.num_pages(), expected.num_pages());
}

TEST(LayoutTest, ARowIsCutIntoBlocksOfEightRanksAndATail) {  // design 3.1
  const LoraModelConfig config = model_of({{64, 32}});
  const auto sizes = [&](std::uint32_t rank) {
    return block_sizes(Layout(config, every_module(config, rank), {4096, 2, 0}), 0);
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sizes(1), (Sizes{1}));
  EXPECT_EQ(sizes(3), (Sizes{3}));
  EXPECT_EQ(sizes(8), (Sizes{8}));
  EXPECT_EQ(sizes(9), (Sizes{8, 1}));
  EXPECT_EQ(sizes(19), (Sizes{8, 8, 3}));
  EXPECT_EQ(sizes(64), Sizes(8, 8));
}

TEST(LayoutTest, TailBlocksAreNotPadded) {  // design 3.1: masked, never padded
  const LoraModelConfig config = model_of({{64, 64}});
  const Layout rank_1(config, every_module(config, 1), {4096, 2, 0});
  EXPECT_EQ(rank_1.payload_bytes(), 2U * 64 * 2);
  const Layout rank_9(config, every_module(config, 9), {4096, 2, 0});
  EXPECT_EQ(rank_9.payload_bytes(), 9U * 2 * 64 * 2);
  EXPECT_EQ(rank_9.num_pages(), 1U);
}

TEST(LayoutTest, PartsCoverAAndBInsideTheirPagesWithoutOverlap) {
  const LoraModelConfig config = model_of({{576, 576}, {576, 192}, {192, 1536}, {7, 3}, {1, 1}});
  for (const std::uint32_t rank : {1U, 3U, 8U, 9U, 19U, 64U}) {
    for (const std::size_t element_bytes : {2U, 4U}) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      expect_sound(Layout(config, every_module(config, rank), {49152, element_bytes, 0}), config);
    }
  }
}

TEST(LayoutTest, PartsAboveMaxPartBytesAreTiledAlongTheirFeatures) {
  const LoraModelConfig config = model_of({{100, 30}});
  const LayoutParams params{1024, 2, 512};  // 32 features of a full block
  const Layout layout(config, every_module(config, 8), params);
  expect_sound(layout, config);
  const Block& block = layout.blocks()[0];
  ASSERT_EQ(block.num_a_parts, 4U);
  EXPECT_EQ(block.num_b_parts, 1U);
  EXPECT_EQ(layout.a_parts(block)[0].length, 32U);
  EXPECT_EQ(layout.a_parts(block)[3].begin, 96U);
  EXPECT_EQ(layout.a_parts(block)[3].length, 4U);
}

TEST(LayoutTest, TheSmallestPartHoldsOneFeature) {
  const LoraModelConfig config = model_of({{5, 4}});
  const Layout layout(config, every_module(config, 8), {64, 4, 32});
  expect_sound(layout, config);
  EXPECT_EQ(layout.blocks()[0].num_a_parts, 5U);
  EXPECT_EQ(layout.num_pages(), 9U);  // a slot each
}

TEST(LayoutTest, FirstFitPutsALaterSmallPartIntoAnEarlierGap) {
  // A: 12 slots of 16. B does not fit beside it; the second module's parts do.
  const LoraModelConfig config = model_of({{48, 40}, {8, 8}});
  const Layout layout(config, every_module(config, 8), {1024, 2, 0});
  expect_sound(layout, config);
  const Block& first = layout.blocks()[0];
  const Block& second = layout.blocks()[1];
  EXPECT_EQ(layout.a_parts(first)[0].at.page, 0U);
  EXPECT_EQ(layout.b_parts(first)[0].at.page, 1U);
  EXPECT_EQ(layout.a_parts(second)[0].at.page, 0U);
  EXPECT_EQ(layout.a_parts(second)[0].at.slot, 12U);
  EXPECT_EQ(layout.b_parts(second)[0].at.slot, 14U);
  EXPECT_EQ(layout.num_pages(), 2U);
}

using RowRange = std::pair<std::uint32_t, std::uint32_t>;

TEST(LayoutTest, RowsOfFindsExactlyTheModulesOfTheAdapter) {
  const LoraModelConfig config = model_of({{8, 8}, {8, 8}, {8, 8}, {8, 8}});
  const Layout layout(config, {{ModuleIndex{1}, 4}, {ModuleIndex{3}, 2}}, {1024, 2, 0});
  EXPECT_EQ(layout.rows_of(ModuleIndex{0}), RowRange(0, 0));
  EXPECT_EQ(layout.rows_of(ModuleIndex{1}), RowRange(0, 1));
  EXPECT_EQ(layout.rows_of(ModuleIndex{2}), RowRange(1, 1));
  EXPECT_EQ(layout.rows_of(ModuleIndex{3}), RowRange(1, 2));
  EXPECT_EQ(layout.rows_of(ModuleIndex{4}), RowRange(0, 0));
}

// Design 3.1: "the offsets let one module hold rows for slices".
TEST(LayoutTest, AModuleMayHaveRowsForSlicesWithRanksOfTheirOwn) {
  const LoraModelConfig config = model_of({{8, 8}, {24, 40}});
  const std::vector<RowShape> rows{{ModuleIndex{0}, 4, {}, {}},
                                   {ModuleIndex{1}, 9, {}, {0, 16}},
                                   {ModuleIndex{1}, 3, {}, {16, 8}},
                                   {ModuleIndex{1}, 5, {8, 10}, {24, 0}}};
  const Layout layout(config, rows, {1024, 2, 0});
  EXPECT_EQ(layout.rows_of(ModuleIndex{1}), RowRange(1, 4));
  EXPECT_EQ(layout.rows()[0].in, (FeatureRange{0, 8}));
  EXPECT_EQ(layout.rows()[1].in, (FeatureRange{0, 24}));
  EXPECT_EQ(layout.rows()[3].out, (FeatureRange{24, 16}));
  EXPECT_EQ(layout.payload_bytes(), 2U * (4 * 16 + 9 * 40 + 3 * 32 + 5 * 26));
  const Block& last = layout.blocks().back();
  EXPECT_EQ(layout.a_parts(last)[0].length, 10U);
  EXPECT_EQ(layout.b_parts(last)[0].length, 16U);
}

TEST(LayoutTest, RefusesSlicesBeyondAModuleAndWeightsThatAreChangedTwice) {
  const LoraModelConfig config = model_of({{8, 12}});
  const auto make = [&](std::vector<RowShape> rows) {
    Layout(config, std::move(rows), LayoutParams{1024, 2, 0});
  };
  const ModuleIndex module{0};
  EXPECT_THROW(make({{module, 2, {8, 0}, {}}}), InvalidArgumentError);
  EXPECT_THROW(make({{module, 2, {4, 5}, {}}}), InvalidArgumentError);
  EXPECT_THROW(make({{module, 2, {}, {0xFFFFFFFFU, 2}}}), InvalidArgumentError);
  EXPECT_THROW(make({{module, 2, {}, {0, 7}}, {module, 2, {}, {6, 0}}}), InvalidArgumentError);
  EXPECT_THROW(
      make({{module, 2, {}, {0, 6}}, {module, 2, {}, {6, 0}}, {module, 2, {7, 1}, {5, 1}}}),
      InvalidArgumentError);
  EXPECT_NO_THROW(make({{module, 2, {}, {0, 6}}, {module, 2, {}, {6, 0}}}));
  EXPECT_NO_THROW(make({{module, 2, {0, 4}, {}}, {module, 2, {4, 4}, {}}}));
}

TEST(LayoutTest, IsSoundForRandomShapes) {
  for (const std::uint32_t seed : seeds(150)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    const auto pick = [&](std::uint32_t low, std::uint32_t high) {
      return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
    };
    Shapes shapes(pick(1, 12));
    for (auto& [in, out] : shapes) {
      in = pick(1, 300);
      out = pick(1, 300);
    }
    const LoraModelConfig config = model_of(shapes);
    std::vector<RowShape> rows;
    for (std::uint32_t i = 0; i < shapes.size(); ++i) {
      if (rows.empty() || pick(0, 3) != 0) {
        rows.push_back({ModuleIndex{i}, pick(1, 40)});
      }
    }
    const std::size_t page_bytes = pick(1, 80) * kSlotBytes;
    const std::size_t max_part = pick(32, static_cast<std::uint32_t>(page_bytes));
    const Layout layout(config, rows, {page_bytes, pick(0, 1) == 0 ? 2U : 4U, max_part});
    expect_sound(layout, config);
    if (HasFatalFailure()) {
      return;
    }
  }
}

TEST(LayoutTest, RefusesParametersThatCannotHoldABlock) {
  const LoraModelConfig config = model_of({{8, 8}});
  const auto make = [&](LayoutParams params) { Layout(config, every_module(config, 8), params); };
  EXPECT_THROW(make({0, 2, 0}), InvalidArgumentError);
  EXPECT_THROW(make({100, 2, 0}), InvalidArgumentError);    // not whole slots
  EXPECT_THROW(make({128, 2, 129}), InvalidArgumentError);  // a part over a page
  EXPECT_THROW(make({128, 4, 31}), InvalidArgumentError);   // less than one feature of 8 ranks
  EXPECT_NO_THROW(make({128, 4, 32}));
}

TEST(LayoutTest, RefusesRowsThatAreNotModulesInOrder) {
  const LoraModelConfig config = model_of({{8, 8}, {8, 8}});
  const auto make = [&](std::vector<RowShape> rows) {
    Layout(config, std::move(rows), LayoutParams{1024, 2, 0});
  };
  EXPECT_THROW(make({{ModuleIndex{2}, 8}}), InvalidArgumentError);
  EXPECT_THROW(make({{ModuleIndex{0}, 0}}), InvalidArgumentError);
  EXPECT_THROW(make({{ModuleIndex{0}, 1025}}), InvalidArgumentError);
  EXPECT_THROW(make({{ModuleIndex{0}, 8}, {ModuleIndex{0}, 8}}), InvalidArgumentError);
  EXPECT_THROW(make({{ModuleIndex{1}, 8}, {ModuleIndex{0}, 8}}), InvalidArgumentError);
  EXPECT_NO_THROW(make({{ModuleIndex{0}, 8}, {ModuleIndex{1}, 1024}}));
}

class LayoutCacheTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Layout> get(std::uint32_t rank) {
    return cache_.get({{ModuleIndex{0}, rank}});
  }

  static constexpr std::size_t kMaxLayouts = 3;

  LayoutCache cache_{std::make_shared<const LoraModelConfig>(model_of({{8, 8}})),
                     LayoutParams{1024, 2, 0}, kMaxLayouts};
};

TEST_F(LayoutCacheTest, AdaptersOfOneShapeShareOneLayout) {
  EXPECT_EQ(get(4), get(4));
  EXPECT_NE(get(4), get(5));
  EXPECT_EQ(get(5)->rows()[0].rank, 5U);
}

TEST_F(LayoutCacheTest, SlicesAreAPartOfTheShape) {
  const ModuleIndex module{0};
  const std::vector<RowShape> shapes{{module, 4, {0, 8}, {0, 8}},
                                     {module, 4, {0, 4}, {0, 8}},
                                     {module, 4, {4, 4}, {0, 8}},
                                     {module, 4, {0, 8}, {4, 4}}};
  LayoutCache cache(std::make_shared<const LoraModelConfig>(model_of({{8, 8}})),
                    LayoutParams{1024, 2, 0}, shapes.size());
  for (const RowShape& shape : shapes) {
    EXPECT_EQ(cache.get({shape})->rows()[0], shape);
    EXPECT_EQ(cache.get({shape}), cache.get({shape}));
  }
}

TEST_F(LayoutCacheTest, ForgetsTheShapeThatWasAskedForLongestAgo) {
  const std::weak_ptr<const Layout> first = get(1);
  const std::weak_ptr<const Layout> second = get(2);
  get(3);
  get(1);  // now 2 is the oldest
  get(4);
  EXPECT_FALSE(first.expired());
  EXPECT_TRUE(second.expired());
}

TEST_F(LayoutCacheTest, KeepsNoMoreThanItsBound) {
  std::vector<std::weak_ptr<const Layout>> layouts;
  for (std::uint32_t rank = 1; rank <= 20; ++rank) {
    layouts.push_back(get(rank));
  }
  const auto alive = std::ranges::count_if(layouts, [](const auto& l) { return !l.expired(); });
  EXPECT_EQ(alive, kMaxLayouts);
}

TEST_F(LayoutCacheTest, AForgottenLayoutLivesOnWithItsUsers) {
  const std::shared_ptr<const Layout> used = get(1);
  for (std::uint32_t rank = 2; rank <= 10; ++rank) {
    get(rank);
  }
  EXPECT_EQ(used->rows()[0].rank, 1U);
  EXPECT_NE(get(1), used);
}

TEST_F(LayoutCacheTest, AShapeThatIsRefusedLeavesNothingBehind) {
  get(1);
  get(2);
  const std::weak_ptr<const Layout> third = get(3);
  EXPECT_THROW(get(0), InvalidArgumentError);
  EXPECT_FALSE(third.expired());
  EXPECT_EQ(get(3), third.lock());
}

}  // namespace
}  // namespace pagedlora
