// Rows for slices of a module (design 3.1: in_offset, in_length, out_offset, out_length; entries of
// one module add up), on every instruction set: split adapters on fused modules, fused adapters on
// split modules, shards of tensor parallelism.
#include <gtest/gtest.h>

#include <numeric>

#include "all_dtypes.h"
#include "lora_operator_fixture.h"
#include "lora_reference.h"
#include "pagedlora/lora_operator.h"
#include "pagedlora/task_entries.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using testing_support::Adapter;
using testing_support::apply;
using testing_support::batch_of;
using testing_support::config_of;
using testing_support::kDtypes;
using testing_support::kModule;
using testing_support::load;
using testing_support::Matrix;
using testing_support::num_wrong_of_module;
using testing_support::Rng;
using testing_support::usable_isas;

// q, k and v of different ranks on one module of 96 -> 160 (q), 33 (k), 64 (v).
const std::vector<RowShape> kSplitOnFused{
    {kModule, 12, {}, {0, 160}}, {kModule, 3, {}, {160, 33}}, {kModule, 21, {}, {193, 64}}};
// Halves of the inputs and one patch of the middle.
const std::vector<RowShape> kSplitInputs{{kModule, 8, {0, 40}, {0, 200}},
                                         {kModule, 5, {40, 56}, {0, 200}},
                                         {kModule, 9, {7, 19}, {203, 9}}};

class LoraSlicesTest : public ::testing::TestWithParam<Isa> {
 protected:
  const LoraModelConfig config_ = config_of({{96, 257}});
  Rng rng_{7};
};

INSTANTIATE_TEST_SUITE_P(All, LoraSlicesTest, ::testing::ValuesIn(usable_isas()),
                         [](const auto& of) { return std::string(isa_name(of.param)); });

TEST_P(LoraSlicesTest, RowsOfOneModuleAddUpWhereTheirSlicesSay) {
  for (const std::vector<RowShape>& shapes : {kSplitOnFused, kSplitInputs}) {
    for (const Dtype activations : kDtypes) {
      for (const Dtype weights : kDtypes) {
        for (const std::size_t max_part : {std::size_t{0}, std::size_t{1024}}) {
          Adapter adapter(config_, shapes, weights, max_part, rng_);
          LoraOperator lora(weights, GetParam());
          Matrix x = Matrix::random(19, 96, activations, rng_);
          Matrix y = Matrix::random(19, 257, activations, rng_);
          const Matrix before = y;
          apply(lora, batch_of({{adapter.pages(), 19}}), 0, x, y);
          EXPECT_EQ(num_wrong_of_module(GetParam(), adapter, kModule, x, before, y), 0);
        }
      }
    }
  }
}

TEST_P(LoraSlicesTest, TheReferenceNoticesARowAtAnotherOffset) {
  Adapter adapter(config_, kSplitOnFused, Dtype::float32, 0, rng_);
  LoraOperator lora(Dtype::float32, GetParam());
  Matrix x = Matrix::random(2, 96, Dtype::float32, rng_);
  Matrix y = Matrix::random(2, 257, Dtype::float32, rng_);
  const Matrix before = y;
  apply(lora, batch_of({{adapter.pages(), 2}}), 0, x, y);
  adapter.rows[1].out_offset -= 1;
  EXPECT_GT(num_wrong_of_module(GetParam(), adapter, kModule, x, before, y), 30);
  adapter.rows[1].out_offset += 1;
  adapter.rows[2].in_offset = 1;
  adapter.rows[2].in -= 1;
  EXPECT_GT(num_wrong_of_module(GetParam(), adapter, kModule, x, before, y), 30);
}

TEST_P(LoraSlicesTest, OutputsOutsideEverySliceAreNotWritten) {
  Adapter adapter(config_, kSplitInputs, Dtype::bfloat16, 0, rng_);
  LoraOperator lora(Dtype::bfloat16, GetParam());
  Matrix x = Matrix::random(3, 96, Dtype::float32, rng_);
  Matrix y = Matrix::random(3, 257, Dtype::float32, rng_);
  const Matrix before = y;
  apply(lora, batch_of({{adapter.pages(), 3}}), 0, x, y);
  for (std::uint32_t token = 0; token < 3; ++token) {
    for (std::uint32_t o = 0; o < 257; ++o) {
      const bool is_covered = o < 200 || (o >= 203 && o < 212);
      EXPECT_EQ(y.get(token, o) != before.get(token, o), is_covered) << o;
    }
  }
}

TEST_P(LoraSlicesTest, ARowIsBitIdenticalAloneAndAmongNeighbours) {
  Adapter adapter(config_, kSplitOnFused, Dtype::bfloat16, 1024, rng_);
  Adapter other(config_, kSplitInputs, Dtype::bfloat16, 0, rng_);
  LoraOperator lora(Dtype::bfloat16, GetParam());
  Matrix x = Matrix::random(37, 96, Dtype::bfloat16, rng_);
  const Matrix before = Matrix::random(37, 257, Dtype::bfloat16, rng_);
  Matrix together = before;
  apply(lora, batch_of({{adapter.pages(), 20}, {other.pages(), 10}, {adapter.pages(), 7}}), 0, x,
        together);
  for (std::uint32_t row = 0; row < 37; ++row) {
    Matrix x1 = x.pick({row}, x.dtype(), 0);
    Matrix y1 = before.pick({row}, x.dtype(), 0);
    Adapter& own = row >= 20 && row < 30 ? other : adapter;
    apply(lora, batch_of({{own.pages(), 1}}), 0, x1, y1);
    EXPECT_EQ(y1.row_bytes(0), together.row_bytes(row)) << "row " << row;
  }
}

// Whoever computes from the entries gets what the operator adds.
TEST(LoraSliceEntriesTest, EntriesCarryTheOffsetsOfTheirTiles) {
  Rng rng(8);
  const LoraModelConfig config = config_of({{96, 257}});
  for (const std::vector<RowShape>& shapes : {kSplitOnFused, kSplitInputs}) {
    Adapter adapter(config, shapes, Dtype::float32, 2048, rng);
    Matrix x = Matrix::random(1, 96, Dtype::float32, rng);
    std::vector<double> y(257);
    for (const TaskLayerModuleConfig& entry : task_entries(adapter.pages(), config)) {
      const auto* a = std::bit_cast<const std::byte*>(entry.weights_in_pointer);
      const auto* b = std::bit_cast<const std::byte*>(entry.weights_out_pointer);
      for (std::uint32_t r = 0; r < entry.adapter_size; ++r) {
        double t = 0;
        for (std::uint32_t i = 0; i < entry.in_size; ++i) {
          t +=
              load(a + (r * entry.in_size + i) * 4, Dtype::float32) * x.get(0, entry.in_offset + i);
        }
        for (std::uint32_t o = 0; o < entry.out_size; ++o) {
          y[entry.out_offset + o] +=
              entry.scale * t * load(b + (o * entry.adapter_size + r) * 4, Dtype::float32);
        }
      }
    }
    Matrix expected(1, 257, Dtype::float32);
    for (std::uint32_t o = 0; o < 257; ++o) {
      expected.set(0, o, 0.0F);
    }
    LoraOperator lora(Dtype::float32);
    apply(lora, batch_of({{adapter.pages(), 1}}), 0, x, expected);
    for (std::uint32_t o = 0; o < 257; ++o) {
      EXPECT_NEAR(y[o], expected.get(0, o), 1e-4) << o;
    }
  }
}

}  // namespace
}  // namespace pagedlora
