// The body of the scatter kernel against the CPU executor (design 3.2: one plan, two executors, the
// same bits): whatever the shapes, slices, types, chunks and alignments.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "body/scatter_rows.h"
#include "cuda/random_scatter.h"
#include "cuda/run_on_host.h"
#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/cuda/scatter_list.h"
#include "pagedlora/errors.h"
#include "pagedlora/scatter_plan.h"
#include "random_seeds.h"
#include "thrown_by.h"

namespace pagedlora::cuda {
namespace {

using testing_support::ArenaBytes;
using testing_support::FakeSource;
using testing_support::filled_by_cpu;
using testing_support::kDtypes;
using testing_support::pick;
using testing_support::RandomScatter;
using testing_support::Rng;
using testing_support::run_on_host;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::store;
using testing_support::thrown_by;

const auto kSeeds = static_cast<std::uint32_t>(testing_support::num_steps(150));

// The chunks of an adapter as a stager would have them, and their copies in a list.
std::vector<std::unique_ptr<ArenaBytes>> stage(const RandomScatter& adapter,
                                               const TaskPages& target, std::size_t chunk_bytes,
                                               std::size_t shift, std::uint32_t overflow_word,
                                               ScatterList& list) {
  std::vector<std::unique_ptr<ArenaBytes>> staged;
  adapter.scatter->list_copies(target.dtype, chunk_bytes, [&](const ScatterPlan::Chunk& chunk) {
    EXPECT_LE(chunk.bytes, chunk_bytes);
    staged.push_back(std::make_unique<ArenaBytes>(chunk.bytes, shift));
    std::memcpy(staged.back()->data(), adapter.source->bytes.data() + chunk.offset, chunk.bytes);
    list.add(chunk.copies, staged.back()->data(), target, overflow_word);
  });
  return staged;
}

// One launch of all that is listed.
std::vector<std::uint32_t> launch(const ScatterList& list, std::uint32_t num_words, Rng& order) {
  std::vector<std::uint64_t> image((list.image_bytes() + 7) / 8);
  auto* at = reinterpret_cast<std::byte*>(image.data());
  list.write_image(at);
  std::vector<std::uint32_t> words(num_words, 0);
  const ScatterWork work = list.work_of(at, words.data());
  run_on_host(ScatterRows{work}, work.num_tiles, 1, &order);
  return words;
}

TEST(ScatterKernelTest, OneLaunchFillsThePagesOfManyAdaptersAsTheCpuDoes) {
  std::array<int, 3> tiles_of_mode{};
  int tiles_of_unaligned = 0;
  for (const std::uint32_t seed : seeds(kSeeds)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype dtype = kDtypes[seed % 3];
    ScatterList list;
    std::vector<std::unique_ptr<RandomScatter>> adapters;
    std::vector<std::unique_ptr<ArenaBytes>> pools;
    std::vector<std::vector<std::unique_ptr<ArenaBytes>>> staged;
    const std::uint32_t count = pick(rng, 1, 3);
    for (std::uint32_t i = 0; i < count; ++i) {
      const bool is_aligned = pick(rng, 0, 2) != 0;
      adapters.push_back(std::make_unique<RandomScatter>(dtype, is_aligned, rng));
      pools.push_back(std::make_unique<ArenaBytes>(adapters[i]->pool_bytes()));
      const std::size_t chunk = pick(rng, 0, 1) == 0
                                    ? ScatterPlan::kMinChunkBytes + pick(rng, 0, 9'999)
                                    : ScatterPlan::kChunkBytes;
      staged.push_back(stage(*adapters[i], adapters[i]->view(*pools[i]), chunk,
                             is_aligned ? 0 : pick(rng, 0, 15), i, list));
    }
    for (const ScatterTile& tile : list.tiles()) {
      const ScatterDescriptor& descriptor = list.descriptors()[tile.descriptor];
      ++tiles_of_mode[static_cast<std::size_t>(descriptor.mode)];
      tiles_of_unaligned += !descriptor.source_is_aligned;
    }
    EXPECT_EQ(launch(list, count, rng), std::vector<std::uint32_t>(count, 0));
    for (std::uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(pools[i]->copy(), filled_by_cpu(*adapters[i], dtype)) << "adapter " << i;
    }
  }
  if (seeds(kSeeds).size() > 1) {  // every way to move bytes was taken
    for (const int tiles : tiles_of_mode) {
      EXPECT_GT(tiles, 50);
    }
    EXPECT_GT(tiles_of_unaligned, 50);
  }
}

// One row of one module, whole, in one chunk; A and then B, with one value at a place.
struct OneRow {
  OneRow(Dtype from, std::uint32_t rank, std::uint32_t in, std::uint32_t out,
         ModuleKind kind = ModuleKind::linear)
      : config({{"m", -1, -1, in, out, kind}}, Dtype::float16, LoraModelConfig::kMaxRank),
        source(std::make_shared<FakeSource>(
            std::vector<std::byte>(std::size_t{rank} * (in + out) * element_bytes(from)))) {
    const std::uint64_t b = std::uint64_t{rank} * in * element_bytes(from);
    plan = std::make_unique<AdapterPlan>(
        config, std::vector{PlannedRow{ModuleIndex{0}, rank, {0, from}, {b, from}}}, source);
  }

  // What the overflow word is after a launch that fills pages of `dtype`.
  std::uint32_t word_after_launch(Dtype dtype) {
    const Layout layout(config, plan->row_shapes(), {65536, element_bytes(dtype), 0});
    const ScatterPlan scatter(config, *plan, layout);
    ArenaBytes pool(layout.num_pages() * 65536);
    std::vector<PageId> pages;
    for (const std::uint32_t page : testing_support::all_of(layout.num_pages())) {
      pages.push_back(PageId{page});
    }
    const TaskPages view{&layout, pages.data(), plan->scales().data(), pool.data(), 65536, dtype};
    ArenaBytes staged(source->bytes.size());
    ScatterList list;
    scatter.list_copies(dtype, 1U << 20, [&](const ScatterPlan::Chunk& chunk) {
      std::memcpy(staged.data() + chunk.offset, source->bytes.data() + chunk.offset, chunk.bytes);
      list.add(chunk.copies, staged.data() + chunk.offset, view, 1);
    });
    Rng rng(7);
    const std::vector<std::uint32_t> words = launch(list, 3, rng);
    EXPECT_EQ(words[0] + words[2], 0U);
    if (words[1] != 0) {
      std::vector<std::byte> chunk(1U << 20);
      const auto by_word =
          thrown_by<AdapterFormatError>([&] { scatter.refuse_overflow(words[1] - 1); });
      const auto by_cpu = thrown_by<AdapterFormatError>(
          [&] { scatter.execute(*source->open(), dtype, chunk, view, nullptr); });
      EXPECT_STREQ(by_word.value().what(), by_cpu.value().what());
    }
    return words[1];
  }

  LoraModelConfig config;
  std::shared_ptr<FakeSource> source;
  std::unique_ptr<AdapterPlan> plan;
};

TEST(ScatterKernelTest, AnOverflowOfFloat16NamesItsMatrixAsTheCpuDoes) {
  for (const Dtype from : {Dtype::float32, Dtype::bfloat16}) {
    for (const std::uint32_t rank : {8U, 5U}) {
      for (const ModuleKind kind : {ModuleKind::linear, ModuleKind::embedding}) {
        for (const bool in_b : {false, true}) {
          OneRow row(from, rank, 1'000, 700, kind);
          const std::size_t first = in_b ? std::size_t{rank} * 1'000 : 0;
          const std::size_t size = std::size_t{rank} * (in_b ? 700 : 1'000);
          for (const std::size_t at : {std::size_t{0}, size / 2, size - 1}) {
            std::byte* value = row.source->bytes.data() + (first + at) * element_bytes(from);
            store(value, from, -65280.0F);  // the last that fits, in either type
            EXPECT_EQ(row.word_after_launch(Dtype::float16), 0U);
            store(value, from, 65536.0F);
            EXPECT_EQ(row.word_after_launch(Dtype::float16), in_b ? 2U : 1U);
            EXPECT_EQ(row.word_after_launch(Dtype::bfloat16), 0U);
            store(value, from, std::numeric_limits<float>::infinity());
            EXPECT_EQ(row.word_after_launch(Dtype::float16), 0U);
            store(value, from, 0.0F);
          }
        }
      }
    }
  }
}

TEST(ScatterKernelTest, NoCopiesAreNoTiles) {
  ScatterList list;
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.image_bytes(), 0U);
  EXPECT_EQ(list.work_of(nullptr, nullptr).num_tiles, 0U);
}

TEST(ScatterKernelTest, ABigCopyIsManyTilesOfOneDescriptor) {
  OneRow row(Dtype::bfloat16, 1, 30'000, 2);
  const Layout layout(row.config, row.plan->row_shapes(), {65536, 2, 0});
  const ScatterPlan scatter(row.config, *row.plan, layout);
  const std::vector<PageId> pages(layout.num_pages(), PageId{0});
  const TaskPages view{&layout, pages.data(), nullptr, nullptr, 65536, Dtype::bfloat16};
  ScatterList list;
  scatter.list_copies(Dtype::bfloat16, 1U << 20, [&](const ScatterPlan::Chunk& chunk) {
    list.add(chunk.copies, nullptr, view, 0);
  });
  ASSERT_EQ(list.descriptors().size(), 2U);
  EXPECT_EQ(list.descriptors()[0].mode, ScatterMode::vectors);
  EXPECT_EQ(list.tiles().size(), (60'000U + 16'383) / 16'384 + 1);
}

// Threads beside each other touch bytes beside each other: what coalescing asks for.
TEST(ScatterKernelTest, WholeBlocksOfMatricesWithRoomyRanksMove16BytesPerThread) {
  OneRow row(Dtype::bfloat16, 64, 1'024, 512);
  const Layout layout(row.config, row.plan->row_shapes(), {65536, 2, 0});
  const ScatterPlan scatter(row.config, *row.plan, layout);
  const std::vector<PageId> pages(layout.num_pages(), PageId{0});
  const TaskPages view{&layout, pages.data(), nullptr, nullptr, 65536, Dtype::bfloat16};
  ScatterList list;
  scatter.list_copies(Dtype::bfloat16, 1U << 20, [&](const ScatterPlan::Chunk& chunk) {
    list.add(chunk.copies, nullptr, view, 0);
  });
  for (const ScatterDescriptor& descriptor : list.descriptors()) {
    EXPECT_EQ(descriptor.mode, ScatterMode::vectors);
  }
}

}  // namespace
}  // namespace pagedlora::cuda
