// Slices of stored matrices (design 3.2: "with optional slice"): shards, parts of fused tensors,
// and one stored matrix for several rows. What is read is counted.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "all_dtypes.h"
#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/scatter_plan.h"
#include "pagedlora/task_entries.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::config_of;
using testing_support::FakeSource;
using testing_support::kDtypes;
using testing_support::load;
using testing_support::Rng;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::store;
using testing_support::uniform;

// A matrix [rows, columns] in a source, and the planned matrix for some of its rows and columns.
struct Stored {
  std::uint64_t offset;
  Dtype dtype;
  std::uint32_t rows;
  std::uint32_t columns;

  PlannedMatrix slice(std::uint32_t row, std::uint32_t column) const {
    return {offset + (std::uint64_t{row} * columns + column) * element_bytes(dtype), dtype,
            columns};
  }
};

class StoredMatrices {
 public:
  Stored add(std::uint32_t rows, std::uint32_t columns, Dtype dtype, Rng& rng) {
    const Stored stored{bytes.size(), dtype, rows, columns};
    bytes.resize(bytes.size() + std::size_t{rows} * columns * element_bytes(dtype));
    for (std::size_t at = stored.offset; at < bytes.size(); at += element_bytes(dtype)) {
      store(bytes.data() + at, dtype, uniform(rng));
    }
    return stored;
  }
  std::vector<std::byte> bytes;
};

struct Loaded {
  std::shared_ptr<FakeSource> source;
  ScatterPlan::Outcome outcome;
  std::uint64_t promised_bytes = 0;
};

// Of all chunks that another executor is told to read; every copy must lie in its chunk.
std::uint64_t listed_bytes(const ScatterPlan& scatter, Dtype dtype, std::size_t chunk_bytes) {
  std::uint64_t bytes = 0;
  scatter.list_copies(dtype, chunk_bytes, [&](const ScatterPlan::Chunk& chunk) {
    EXPECT_LE(chunk.bytes, chunk_bytes);
    for (const ScatterCopy& copy : chunk.copies) {
      EXPECT_LE(copy.at + (copy.rows - 1) * copy.source_stride_bytes +
                    copy.columns * element_bytes(copy.source_dtype),
                chunk.bytes);
    }
    bytes += chunk.bytes;
  });
  return bytes;
}

// Executes the plan and compares every row with the source, one element after the other.
Loaded load_and_compare(const LoraModelConfig& config, std::vector<PlannedRow> planned,
                        const StoredMatrices& stored, Dtype dtype, std::size_t chunk_bytes,
                        std::size_t max_part = 0) {
  Loaded loaded{std::make_shared<FakeSource>(stored.bytes), {}, 0};
  const AdapterPlan plan(config, std::move(planned), loaded.source);
  const Layout layout(config, plan.row_shapes(), {4096, element_bytes(dtype), max_part});
  std::vector<std::byte> pool(layout.num_pages() * 4096, std::byte{0xFF});
  std::vector<PageId> pages;
  for (std::uint32_t page = 0; page < layout.num_pages(); ++page) {
    pages.push_back(PageId{page});
  }
  const TaskPages view{&layout, pages.data(), plan.scales().data(), pool.data(), 4096, dtype};
  std::vector<std::byte> chunk(chunk_bytes);
  const ScatterPlan scatter(config, plan, layout);
  const auto reader = loaded.source->open();
  loaded.outcome = scatter.execute(*reader, dtype, chunk, view, nullptr);
  loaded.promised_bytes = scatter.source_bytes(chunk_bytes);
  for (std::uint32_t row = 0; row < plan.rows().size(); ++row) {
    const PlannedRow& r = plan.rows()[row];
    std::vector<std::byte> a(std::size_t{r.rank} * r.in.length * element_bytes(dtype));
    std::vector<std::byte> b(std::size_t{r.rank} * r.out.length * element_bytes(dtype));
    gather_row(view, row, a.data(), b.data());
    const auto expect_equal = [&](const PlannedMatrix& matrix, std::uint32_t height,
                                  std::uint32_t width, std::vector<std::byte>& got) {
      const std::size_t stride = matrix.row_stride == 0 ? width : matrix.row_stride;
      std::vector<std::byte> expected(got.size());
      for (std::size_t i = 0; i < height; ++i) {
        for (std::size_t j = 0; j < width; ++j) {
          const std::size_t at = matrix.offset + (i * stride + j) * element_bytes(matrix.dtype);
          store(expected.data() + (i * width + j) * element_bytes(dtype), dtype,
                load(stored.bytes.data() + at, matrix.dtype));
        }
      }
      EXPECT_EQ(got, expected) << "row " << row;
    };
    expect_equal(r.a, r.rank, r.in.length, a);
    expect_equal(r.b, r.out.length, r.rank, b);
  }
  EXPECT_EQ(listed_bytes(scatter, dtype, chunk_bytes), loaded.promised_bytes);
  EXPECT_EQ(loaded.outcome.source_bytes, loaded.promised_bytes);
  EXPECT_EQ(loaded.outcome.source_bytes, loaded.source->bytes_read);
  return loaded;
}

constexpr std::size_t kChunk = ScatterPlan::kMinChunkBytes;

TEST(ScatterSlicesTest, AFusedAdapterOnSplitModulesReadsItsAForEach) {
  Rng rng(1);
  const LoraModelConfig config = config_of({{64, 48}, {64, 16}, {64, 16}});
  StoredMatrices stored;
  const Stored a = stored.add(12, 64, Dtype::bfloat16, rng);
  const Stored b = stored.add(80, 12, Dtype::bfloat16, rng);
  std::vector<PlannedRow> rows;
  for (std::uint32_t i = 0; i < 3; ++i) {
    rows.push_back({ModuleIndex{i}, 12, a.slice(0, 0), b.slice(i == 0 ? 0 : 32 + 16 * i, 0)});
  }
  const Loaded loaded = load_and_compare(config, rows, stored, Dtype::bfloat16, kChunk);
  EXPECT_EQ(loaded.source->reads, 1);  // all of it lies in one chunk
  EXPECT_EQ(loaded.outcome.source_bytes, stored.bytes.size());
}

TEST(ScatterSlicesTest, NarrowColumnsOfWideRowsAreReadAlone) {
  Rng rng(2);
  const LoraModelConfig config = config_of({{100, 40}});
  StoredMatrices stored;
  const Stored a = stored.add(9, 10'000, Dtype::float32, rng);
  const Stored b = stored.add(40, 9, Dtype::float32, rng);
  const Loaded loaded =
      load_and_compare(config, {{ModuleIndex{0}, 9, a.slice(0, 5'000), b.slice(0, 0)}}, stored,
                       Dtype::float32, kChunk);
  EXPECT_EQ(loaded.source->reads, 9 + 1);
  EXPECT_EQ(loaded.outcome.source_bytes, 4U * 9 * (100 + 40));
}

TEST(ScatterSlicesTest, WhatLiesBetweenShortRowsIsReadAsWell) {
  Rng rng(3);
  const LoraModelConfig config = config_of({{100, 40}});
  StoredMatrices stored;
  const Stored a = stored.add(9, 400, Dtype::float32, rng);
  const Stored b = stored.add(40, 9, Dtype::float32, rng);
  const Loaded loaded =
      load_and_compare(config, {{ModuleIndex{0}, 9, a.slice(0, 300), b.slice(0, 0)}}, stored,
                       Dtype::float32, kChunk);
  EXPECT_EQ(loaded.source->reads, 1);
  EXPECT_EQ(loaded.outcome.source_bytes, stored.bytes.size() - 4U * 300);
}

TEST(ScatterSlicesTest, IsExactForRandomSlicesOfRandomMatrices) {
  for (const std::uint32_t seed : seeds(120)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const auto pick = [&](std::uint32_t low, std::uint32_t high) {
      return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
    };
    const std::uint32_t in = pick(1, pick(0, 4) == 0 ? 9'000 : 300);
    const std::uint32_t out = pick(2, 400);
    const LoraModelConfig config = config_of({{in, out}});
    const std::uint32_t cut = pick(1, out - 1);
    StoredMatrices stored;
    std::vector<PlannedRow> rows;
    for (const FeatureRange range : {FeatureRange{0, cut}, FeatureRange{cut, out - cut}}) {
      const std::uint32_t rank = pick(1, 20);
      const std::uint32_t in_begin = pick(0, in - 1);
      const FeatureRange inputs{in_begin, pick(1, in - in_begin)};
      const Stored a =
          stored.add(rank + pick(0, 9), inputs.length + pick(0, 3'000), kDtypes[pick(0, 2)], rng);
      const Stored b =
          stored.add(range.length + pick(0, 50), rank + pick(0, 9), kDtypes[pick(0, 2)], rng);
      rows.push_back({ModuleIndex{0}, rank,
                      a.slice(pick(0, a.rows - rank), pick(0, a.columns - inputs.length)),
                      b.slice(pick(0, b.rows - range.length), pick(0, b.columns - rank)), 1.0F,
                      inputs, range});
    }
    load_and_compare(config, rows, stored, kDtypes[pick(0, 2)], kChunk + pick(0, 20'000),
                     pick(0, 1) == 0 ? 0 : pick(32, 4096));
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(AdapterPlanSlicesTest, RefusesWhatCannotBeASlice) {
  const LoraModelConfig config = config_of({{64, 48}});
  const auto source = std::make_shared<FakeSource>(std::vector<std::byte>(4 * 64 * 8 + 4 * 48 * 8));
  const auto make = [&](std::vector<PlannedRow> rows) {
    AdapterPlan(config, std::move(rows), source);
  };
  const PlannedMatrix a{0, Dtype::float32, 64};
  const PlannedMatrix b{4 * 64 * 8, Dtype::float32, 8};
  const PlannedRow whole{ModuleIndex{0}, 8, a, b, 1.0F, {0, 64}, {0, 48}};
  EXPECT_NO_THROW(make({whole}));
  PlannedRow wrong = whole;
  wrong.a.row_stride = 63;  // rows would overlap
  EXPECT_THROW(make({wrong}), InvalidArgumentError);
  wrong = whole;
  wrong.a.row_stride = 64 + 55;  // the last row ends one element beyond the source
  EXPECT_THROW(make({wrong}), InvalidArgumentError);
  wrong.a.row_stride = 64 + 54;
  EXPECT_NO_THROW(make({wrong}));
  wrong = whole;
  wrong.out = {47, 2};
  EXPECT_THROW(make({wrong}), InvalidArgumentError);
  EXPECT_THROW(make({whole, whole}), InvalidArgumentError);
}

TEST(AdapterPlanSlicesTest, SortsRowsByModuleAndOutputs) {
  const LoraModelConfig config = config_of({{8, 8}, {8, 8}});
  const auto source = std::make_shared<FakeSource>(std::vector<std::byte>(4096));
  const PlannedMatrix matrix{0, Dtype::float32};
  const auto row = [&](std::uint32_t module, std::uint32_t out) {
    return PlannedRow{ModuleIndex{module},     2,  matrix,  matrix,
                      static_cast<float>(out), {}, {out, 2}};
  };
  const AdapterPlan plan(config, {row(1, 4), row(0, 6), row(1, 0), row(0, 2)}, source);
  EXPECT_EQ(plan.scales(), (std::vector<float>{2, 6, 0, 4}));
  EXPECT_EQ(plan.row_shapes()[1], (RowShape{ModuleIndex{0}, 2, {0, 8}, {6, 2}}));
}

// Of an adapter whose modules are all on other ranks of a pipeline.
TEST(AdapterPlanSlicesTest, NoRowsTakeNoPages) {
  const LoraModelConfig config = config_of({{8, 8}});
  const auto source = std::make_shared<FakeSource>(std::vector<std::byte>(64));
  const AdapterPlan plan(config, {}, source);
  EXPECT_TRUE(plan.rows().empty());
  const Layout layout(config, plan.row_shapes(), {.page_bytes = 1024, .element_bytes = 4});
  EXPECT_EQ(layout.num_pages(), 0U);
  EXPECT_EQ(layout.payload_bytes(), 0U);
}

}  // namespace
}  // namespace pagedlora
