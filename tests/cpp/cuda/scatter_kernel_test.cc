// The body of the scatter kernel against the CPU executor (design 3.2: one plan, two executors, the
// same bits): whatever the shapes, slices, types, chunks and alignments.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "all_dtypes.h"
#include "body/scatter_rows.h"
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

using testing_support::FakeSource;
using testing_support::kDtypes;
using testing_support::load;
using testing_support::pick;
using testing_support::Rng;
using testing_support::run_on_host;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::store;
using testing_support::thrown_by;

constexpr std::size_t kPageBytes = 4096;
const auto kSeeds = static_cast<std::uint32_t>(testing_support::num_steps(150));

// Memory aligned like an arena, at the given distance from that.
class Bytes {
 public:
  explicit Bytes(std::size_t size, std::size_t shift = 0)
      : shift_(shift),
        size_(size),
        memory_(static_cast<std::byte*>(
            ::operator new(size + shift + 1, std::align_val_t{kPageBytes}))) {
    std::memset(memory_.get(), 0xFF, size + shift);
  }
  std::byte* data() { return memory_.get() + shift_; }
  std::vector<std::byte> copy() const {
    return {memory_.get() + shift_, memory_.get() + shift_ + size_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{kPageBytes});
    }
  };
  std::size_t shift_;
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

// An adapter in a source: every tensor somewhere in a larger one, of any type and any bits.
class RandomAdapter {
 public:
  RandomAdapter(Dtype cache_dtype, bool is_aligned, Rng& rng) : cache_dtype_(cache_dtype) {
    if (!is_aligned) {
      bytes_.resize(pick(rng, 0, 15));
    }
    std::vector<LoraModule> modules;
    std::vector<PlannedRow> rows;
    const std::uint32_t count = pick(rng, 1, 3);
    for (std::uint32_t i = 0; i < count; ++i) {
      const bool is_wide = pick(rng, 0, 4) == 0;
      const bool is_embedding = pick(rng, 0, 2) == 0;
      const std::uint32_t in = is_wide ? pick(rng, 2'000, 9'000) : 8 * pick(rng, 1, 40);
      const std::uint32_t out = pick(rng, 0, 1) == 0 ? pick(rng, 2, 300) : 16 * pick(rng, 1, 60);
      modules.push_back({"module." + std::to_string(i), -1, -1, in, out,
                         is_embedding ? ModuleKind::embedding : ModuleKind::linear});
      const std::uint32_t cut = pick(rng, 1, out - 1);
      add_row(rows, {i}, modules.back(), {0, cut}, rng);
      add_row(rows, {i}, modules.back(), {cut, out - cut}, rng);
    }
    config_ = std::make_unique<LoraModelConfig>(modules, cache_dtype, LoraModelConfig::kMaxRank);
    source = std::make_shared<FakeSource>(bytes_);
    plan = std::make_unique<AdapterPlan>(*config_, rows, source);
    const std::size_t max_part = pick(rng, 0, 1) == 0 ? 0 : 32 * pick(rng, 1, 128);
    layout =
        std::make_unique<Layout>(*config_, plan->row_shapes(),
                                 LayoutParams{kPageBytes, element_bytes(cache_dtype), max_part});
    scatter = std::make_unique<ScatterPlan>(*config_, *plan, *layout);
    for (const std::uint32_t page : testing_support::all_of(layout->num_pages())) {
      pages_.push_back(PageId{page});
    }
    std::shuffle(pages_.begin(), pages_.end(), rng);
  }

  TaskPages view(Bytes& pool) const {
    return {layout.get(), pages_.data(), plan->scales().data(),
            pool.data(),  kPageBytes,    cache_dtype_};
  }
  std::size_t pool_bytes() const { return layout->num_pages() * kPageBytes; }

  std::shared_ptr<FakeSource> source;
  std::unique_ptr<AdapterPlan> plan;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<ScatterPlan> scatter;

 private:
  void add_row(std::vector<PlannedRow>& rows, ModuleIndex module, const LoraModule& shape,
               FeatureRange out, Rng& rng) {
    const auto in = static_cast<std::uint32_t>(shape.in_features);
    const std::uint32_t begin = pick(rng, 0, 1) == 0 ? 0 : pick(rng, 0, in - 1);
    const FeatureRange inputs{begin, pick(rng, 0, 1) == 0 ? in - begin : pick(rng, 1, in - begin)};
    PlannedRow row{module, pick(rng, 0, 1) == 0 ? 8 * pick(rng, 1, 3) : pick(rng, 1, 20), {}, {}};
    row.in = inputs;
    row.out = out;
    row.a = matrix(row.rank, inputs.length, rng);
    row.b = matrix(out.length, row.rank, rng);
    if (pick(rng, 0, 2) == 0) {
      const PlannedMatrix bias = matrix(1, out.length, rng);
      row.bias = {bias.offset, bias.dtype};
    }
    if (pick(rng, 0, 2) == 0) {
      row.dora_scale = {put(out.length, Dtype::float32, rng), Dtype::float32};
    }
    rows.push_back(row);
  }

  // A slice, now and then of a larger matrix.
  PlannedMatrix matrix(std::uint32_t height, std::uint32_t width, Rng& rng) {
    const Dtype dtype = kDtypes[pick(rng, 0, 2)];
    const bool is_slice = pick(rng, 0, 1) == 0;
    const std::uint32_t columns = width + (is_slice ? pick(rng, 0, 2) * 8 + pick(rng, 0, 1) : 0);
    const std::uint32_t first = pick(rng, 0, columns - width);
    const std::uint64_t offset = put(std::size_t{height} * columns, dtype, rng);
    return {offset + first * element_bytes(dtype), dtype, columns};
  }

  std::uint64_t put(std::size_t elements, Dtype dtype, Rng& rng) {
    const std::uint64_t offset = bytes_.size();
    bytes_.resize(offset + elements * element_bytes(dtype));
    for (std::uint64_t at = offset; at < bytes_.size(); at += element_bytes(dtype)) {
      do {
        const auto bits =
            static_cast<std::uint32_t>(rng());  // subnormals, NaN and infinity among them
        std::memcpy(bytes_.data() + at, &bits, element_bytes(dtype));
      } while (cache_dtype_ == Dtype::float16 &&
               overflows_float16(load(bytes_.data() + at, dtype)));
    }
    return offset;
  }

  Dtype cache_dtype_;
  std::vector<std::byte> bytes_;
  std::unique_ptr<LoraModelConfig> config_;
  std::vector<PageId> pages_;
};

// The chunks of an adapter as a stager would have them, and their copies in a list.
std::vector<std::unique_ptr<Bytes>> stage(const RandomAdapter& adapter, const TaskPages& target,
                                          std::size_t chunk_bytes, std::size_t shift,
                                          std::uint32_t overflow_word, ScatterList& list) {
  std::vector<std::unique_ptr<Bytes>> staged;
  adapter.scatter->list_copies(target.dtype, chunk_bytes, [&](const ScatterPlan::Chunk& chunk) {
    EXPECT_LE(chunk.bytes, chunk_bytes);
    staged.push_back(std::make_unique<Bytes>(chunk.bytes, shift));
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

std::vector<std::byte> filled_by_cpu(const RandomAdapter& adapter, Dtype dtype) {
  Bytes pool(adapter.pool_bytes());
  std::vector<std::byte> chunk(ScatterPlan::kChunkBytes);
  adapter.scatter->execute(*adapter.source->open(), dtype, chunk, adapter.view(pool), nullptr);
  return pool.copy();
}

TEST(ScatterKernelTest, OneLaunchFillsThePagesOfManyAdaptersAsTheCpuDoes) {
  std::array<int, 3> tiles_of_mode{};
  int tiles_of_unaligned = 0;
  for (const std::uint32_t seed : seeds(kSeeds)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype dtype = kDtypes[seed % 3];
    ScatterList list;
    std::vector<std::unique_ptr<RandomAdapter>> adapters;
    std::vector<std::unique_ptr<Bytes>> pools;
    std::vector<std::vector<std::unique_ptr<Bytes>>> staged;
    const std::uint32_t count = pick(rng, 1, 3);
    for (std::uint32_t i = 0; i < count; ++i) {
      const bool is_aligned = pick(rng, 0, 2) != 0;
      adapters.push_back(std::make_unique<RandomAdapter>(dtype, is_aligned, rng));
      pools.push_back(std::make_unique<Bytes>(adapters[i]->pool_bytes()));
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
    Bytes pool(layout.num_pages() * 65536);
    std::vector<PageId> pages;
    for (const std::uint32_t page : testing_support::all_of(layout.num_pages())) {
      pages.push_back(PageId{page});
    }
    const TaskPages view{&layout, pages.data(), plan->scales().data(), pool.data(), 65536, dtype};
    Bytes staged(source->bytes.size());
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
