// From source bytes to parts (design 3.2): whatever the shapes, tiles, chunk and order of tensors,
// the parts hold exactly the narrowed values.
#include "pagedlora/scatter_plan.h"
#include "all_dtypes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/task_entries.h"
#include "random_seeds.h"
#include "thrown_by.h"

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
using testing_support::thrown_by;
using testing_support::uniform;

struct RowSpec {
  std::uint32_t module;
  std::uint32_t rank;
  Dtype a_dtype;
  Dtype b_dtype;
};

// A source whose tensors lie in random order, with holes between them, and the plan that reads it.
class SourceBuilder {
 public:
  SourceBuilder(const LoraModelConfig& config, const std::vector<RowSpec>& rows,
                std::size_t max_hole_bytes, Rng& rng) {
    struct Slot {
      PlannedMatrix* matrix;
      std::size_t elements;
    };
    std::vector<PlannedRow> planned;
    for (const RowSpec& row : rows) {
      planned.push_back({ModuleIndex{row.module}, row.rank, {0, row.a_dtype}, {0, row.b_dtype}});
    }
    std::vector<Slot> slots;
    for (PlannedRow& row : planned) {
      const LoraModule& module = config.module(row.module);
      slots.push_back({&row.a, row.rank * static_cast<std::size_t>(module.in_features)});
      slots.push_back({&row.b, row.rank * static_cast<std::size_t>(module.out_features)});
    }
    std::shuffle(slots.begin(), slots.end(), rng);
    std::vector<std::byte> bytes;
    for (const Slot& slot : slots) {
      const std::size_t hole = max_hole_bytes == 0 ? 0 : rng() % max_hole_bytes;
      bytes.resize(bytes.size() + hole, std::byte{0xFF});
      slot.matrix->offset = bytes.size();
      const std::size_t element = element_bytes(slot.matrix->dtype);
      bytes.resize(bytes.size() + slot.elements * element);
      for (std::size_t i = 0; i < slot.elements; ++i) {
        store(bytes.data() + slot.matrix->offset + i * element, slot.matrix->dtype, uniform(rng));
      }
    }
    source = std::make_shared<FakeSource>(std::move(bytes));
    plan = std::make_shared<AdapterPlan>(config, std::move(planned), source);
  }

  std::shared_ptr<FakeSource> source;
  std::shared_ptr<AdapterPlan> plan;
};

// Pages in shuffled order in a pool filled with 0xFF.
class Target {
 public:
  Target(const Layout& layout, const AdapterPlan& plan, Rng& rng)
      : layout_(layout),
        scales_(plan.scales()),
        pool_(layout.num_pages() * layout.params().page_bytes, std::byte{0xFF}),
        pages_(layout.num_pages()) {
    for (std::uint32_t page = 0; page < pages_.size(); ++page) {
      pages_[page] = PageId{page};
    }
    std::shuffle(pages_.begin(), pages_.end(), rng);
  }
  TaskPages view() {
    return {&layout_, pages_.data(), scales_.data(), pool_.data(), layout_.params().page_bytes};
  }

 private:
  const Layout& layout_;
  std::vector<float> scales_;
  std::vector<std::byte> pool_;
  std::vector<PageId> pages_;
};

// The matrix as the source has it, converted one element after the other.
std::vector<std::byte> narrowed(const FakeSource& source, const PlannedMatrix& matrix,
                                std::size_t elements, Dtype dtype) {
  std::vector<std::byte> result(elements * element_bytes(dtype));
  for (std::size_t i = 0; i < elements; ++i) {
    const float value =
        load(source.bytes.data() + matrix.offset + i * element_bytes(matrix.dtype), matrix.dtype);
    store(result.data() + i * element_bytes(dtype), dtype, value);
  }
  return result;
}

void expect_content(const TaskPages& pages, const LoraModelConfig& config,
                    const SourceBuilder& built, Dtype dtype) {
  for (std::uint32_t row = 0; row < built.plan->rows().size(); ++row) {
    const PlannedRow& planned = built.plan->rows()[row];
    const LoraModule& module = config.module(planned.module);
    const auto a_elements = planned.rank * static_cast<std::size_t>(module.in_features);
    const auto b_elements = planned.rank * static_cast<std::size_t>(module.out_features);
    std::vector<std::byte> a(a_elements * element_bytes(dtype));
    std::vector<std::byte> b(b_elements * element_bytes(dtype));
    gather_row(pages, row, a.data(), b.data());
    EXPECT_EQ(a, narrowed(*built.source, planned.a, a_elements, dtype)) << "A of row " << row;
    EXPECT_EQ(b, narrowed(*built.source, planned.b, b_elements, dtype)) << "B of row " << row;
  }
}

// Executes the plan into one or two targets and compares.
void expect_scattered(const LoraModelConfig& config, const SourceBuilder& built,
                      const LayoutParams& params, Dtype dtype, std::size_t chunk_bytes,
                      bool with_second, Rng& rng) {
  const Layout layout(config, built.plan->row_shapes(), params);
  const ScatterPlan scatter(config, *built.plan, layout);
  Target first(layout, *built.plan, rng);
  Target second(layout, *built.plan, rng);
  std::vector<std::byte> chunk(chunk_bytes);
  const TaskPages second_view = second.view();
  const auto reader = built.source->open();
  scatter.execute(*reader, dtype, chunk, first.view(), with_second ? &second_view : nullptr);
  expect_content(first.view(), config, built, dtype);
  if (with_second) {
    expect_content(second.view(), config, built, dtype);
  }
}

TEST(ScatterPlanTest, EveryPairOfTypesIsNarrowedExactly) {
  Rng rng(1);
  const LoraModelConfig config = config_of({{100, 40}, {7, 130}});
  for (const Dtype from : kDtypes) {
    for (const Dtype to : kDtypes) {
      SCOPED_TRACE(std::string(dtype_name(from)) + " to " + std::string(dtype_name(to)));
      const SourceBuilder built(config, {{0, 11, from, from}, {1, 8, from, from}}, 0, rng);
      const LayoutParams params{2048, element_bytes(to), 512};
      expect_scattered(config, built, params, to, ScatterPlan::kMinChunkBytes, false, rng);
    }
  }
}

TEST(ScatterPlanTest, RowsLongerThanAChunkArriveInPieces) {
  Rng rng(2);
  const LoraModelConfig config = config_of({{70'000, 9}});  // a row of A is 280,000 bytes
  const SourceBuilder built(config, {{0, 9, Dtype::float32, Dtype::float32}}, 100, rng);
  for (const std::size_t chunk : {std::size_t{16} << 10, std::size_t{16'411}}) {
    const LayoutParams params{1U << 20, 2, 30'000};
    expect_scattered(config, built, params, Dtype::bfloat16, chunk, true, rng);
  }
}

TEST(ScatterPlanTest, ReadsNeighbouringMatricesTogetherAndEachOnce) {
  Rng rng(3);
  const LoraModelConfig config = config_of({{64, 64}, {64, 64}, {64, 64}});
  const SourceBuilder built(config,
                            {{0, 8, Dtype::bfloat16, Dtype::bfloat16},
                             {1, 8, Dtype::bfloat16, Dtype::bfloat16},
                             {2, 8, Dtype::bfloat16, Dtype::bfloat16}},
                            0, rng);
  expect_scattered(config, built, {4096, 2, 0}, Dtype::bfloat16, ScatterPlan::kMinChunkBytes, false,
                   rng);
  EXPECT_EQ(built.source->reads, 1);
  EXPECT_EQ(built.source->bytes_read, built.source->size_bytes());
  const Layout layout(config, built.plan->row_shapes(), {4096, 2, 0});
  EXPECT_EQ(ScatterPlan(config, *built.plan, layout).source_bytes(), built.source->size_bytes());
}

TEST(ScatterPlanTest, SkipsWideHolesOfTheSource) {
  Rng rng(4);
  const LoraModelConfig config = config_of({{64, 64}});
  SourceBuilder built(config, {{0, 8, Dtype::bfloat16, Dtype::bfloat16}}, 0, rng);
  std::vector<std::byte>& bytes = built.source->bytes;
  // Moves the second of the two matrices a megabyte away.
  PlannedRow row = built.plan->rows()[0];
  PlannedMatrix& last = row.a.offset < row.b.offset ? row.b : row.a;
  bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(last.offset), 1U << 20, std::byte{1});
  last.offset += 1U << 20;
  built.plan = std::make_shared<AdapterPlan>(config, std::vector{row}, built.source);
  expect_scattered(config, built, {4096, 2, 0}, Dtype::bfloat16, ScatterPlan::kMinChunkBytes, false,
                   rng);
  EXPECT_EQ(built.source->reads, 2);
  EXPECT_EQ(built.source->bytes_read, 2U * 1024);
}

TEST(ScatterPlanTest, TwoModulesMayShareOneMatrixOfTheSource) {
  Rng rng(5);
  const LoraModelConfig config = config_of({{64, 64}, {64, 64}});
  SourceBuilder built(
      config, {{0, 12, Dtype::float32, Dtype::float32}, {1, 12, Dtype::float32, Dtype::float32}}, 0,
      rng);
  std::vector<PlannedRow> rows = built.plan->rows();
  rows[1].a = rows[0].a;
  built.plan = std::make_shared<AdapterPlan>(config, rows, built.source);
  expect_scattered(config, built, {4096, 4, 0}, Dtype::float32, ScatterPlan::kMinChunkBytes, false,
                   rng);
}

TEST(ScatterPlanTest, IsExactForRandomShapesTilesChunksAndSources) {
  for (const std::uint32_t seed : seeds(120)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const auto pick = [&](std::uint32_t low, std::uint32_t high) {
      return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
    };
    std::vector<std::pair<std::uint32_t, std::uint32_t>> in_out(pick(1, 6));
    for (auto& [in, out] : in_out) {
      in = pick(1, pick(0, 5) == 0 ? 12'000 : 200);
      out = pick(1, pick(0, 5) == 0 ? 2'000 : 200);
    }
    const LoraModelConfig config = config_of(in_out);
    std::vector<RowSpec> rows;
    for (std::uint32_t i = 0; i < in_out.size(); ++i) {
      if (rows.empty() || pick(0, 3) != 0) {
        rows.push_back({i, pick(1, 30), kDtypes[pick(0, 2)], kDtypes[pick(0, 2)]});
      }
    }
    const Dtype to = kDtypes[pick(0, 2)];
    const std::size_t page_bytes = pick(1, 400) * kSlotBytes;
    const std::size_t max_part =
        pick(0, 1) == 0 ? page_bytes : pick(32, static_cast<std::uint32_t>(page_bytes));
    const std::size_t hole = pick(0, 2) == 0 ? 0 : pick(1, 20'000);
    const SourceBuilder built(config, rows, hole, rng);
    expect_scattered(config, built, {page_bytes, element_bytes(to), max_part}, to,
                     ScatterPlan::kMinChunkBytes + pick(0, 20'000), pick(0, 1) == 0, rng);
    EXPECT_EQ(built.source->live_readers, 0);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

class ScatterPlanErrorTest : public ::testing::Test {
 protected:
  void execute(const SourceBuilder& built, Dtype dtype) {
    const Layout layout(config_, built.plan->row_shapes(), {2048, element_bytes(dtype), 0});
    Target target(layout, *built.plan, rng_);
    std::vector<std::byte> chunk(ScatterPlan::kMinChunkBytes);
    const auto reader = built.source->open();
    ScatterPlan(config_, *built.plan, layout)
        .execute(*reader, dtype, chunk, target.view(), nullptr);
  }

  Rng rng_{6};
  const LoraModelConfig config_ = config_of({{40, 30}, {3'000, 20}});
  const SourceBuilder built_{
      config_,
      {{0, 9, Dtype::float32, Dtype::bfloat16}, {1, 10, Dtype::float32, Dtype::float32}},
      0,
      rng_};
};

TEST_F(ScatterPlanErrorTest, AValueThatFloat16CannotHoldNamesItsModuleAndMatrix) {
  const auto tensor_at_fault = [&](const PlannedMatrix& matrix, std::size_t element) {
    std::byte* at =
        built_.source->bytes.data() + matrix.offset + element * element_bytes(matrix.dtype);
    const float before = load(at, matrix.dtype);
    store(at, matrix.dtype, -70'000.0F);
    EXPECT_NO_THROW(execute(built_, Dtype::bfloat16));
    const auto error = thrown_by<AdapterFormatError>([&] { execute(built_, Dtype::float16); });
    store(at, matrix.dtype, before);
    EXPECT_EQ(error ? error->path : "", "fake source");
    return error ? error->tensor : "";
  };
  const std::vector<PlannedRow>& rows = built_.plan->rows();
  EXPECT_EQ(tensor_at_fault(rows[0].a, 0), "module.0.lora_A");
  EXPECT_EQ(tensor_at_fault(rows[0].b, 9 * 30 - 1), "module.0.lora_B");
  EXPECT_EQ(tensor_at_fault(rows[1].a, 10 * 3'000 - 1), "module.1.lora_A");
  EXPECT_EQ(tensor_at_fault(rows[1].b, 100), "module.1.lora_B");
  EXPECT_NO_THROW(execute(built_, Dtype::float16));
}

TEST_F(ScatterPlanErrorTest, WhatTheReaderThrowsComesThrough) {
  execute(built_, Dtype::float32);
  const int num_reads = built_.source->reads;
  ASSERT_GT(num_reads, 2);
  for (int n = 0; n < num_reads; ++n) {
    built_.source->fail_read_after = n;
    EXPECT_THROW(execute(built_, Dtype::float32), AdapterReadError) << "read " << n;
  }
  EXPECT_EQ(built_.source->live_readers, 0);
}

TEST_F(ScatterPlanErrorTest, AChunkBelowTheMinimumIsAMistakeOfTheCaller) {
  const Layout layout(config_, built_.plan->row_shapes(), {2048, 4, 0});
  Target target(layout, *built_.plan, rng_);
  std::vector<std::byte> chunk(ScatterPlan::kMinChunkBytes - 1);
  const auto reader = built_.source->open();
  EXPECT_THROW(ScatterPlan(config_, *built_.plan, layout)
                   .execute(*reader, Dtype::float32, chunk, target.view(), nullptr),
               std::logic_error);
  EXPECT_EQ(built_.source->reads, 0);
}

}  // namespace
}  // namespace pagedlora
