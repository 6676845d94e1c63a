// Biases and DoRA scales of rows (design 3.1: "other kinds: bias, DoRA scale"; 3.5 has the
// formula), on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "all_dtypes.h"
#include "lora_operator_fixture.h"
#include "lora_reference.h"
#include "pagedlora/errors.h"
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
using testing_support::Matrix;
using testing_support::num_wrong_of_module;
using testing_support::Rng;
using testing_support::usable_isas;

RowShape shape_of(std::uint32_t rank, bool has_bias, bool has_dora_scale, FeatureRange out = {}) {
  return {kModule, rank, {}, out, has_bias, has_dora_scale};
}

const std::vector<std::vector<RowShape>> kShapes{
    {shape_of(5, true, false)},
    {shape_of(12, false, true)},
    {shape_of(1, true, true)},
    {shape_of(8, true, false, {0, 100}), shape_of(3, false, true, {100, 71}),
     shape_of(9, true, true, {180, 77})}};

class LoraVectorsTest : public ::testing::TestWithParam<Isa> {
 protected:
  const LoraModelConfig config_ = config_of({{65, 257}});
  Rng rng_{11};
};

INSTANTIATE_TEST_SUITE_P(All, LoraVectorsTest, ::testing::ValuesIn(usable_isas()),
                         [](const auto& of) { return std::string(isa_name(of.param)); });

TEST_P(LoraVectorsTest, AgreesWithFloat64) {
  for (const std::vector<RowShape>& shapes : kShapes) {
    for (const Dtype activations : kDtypes) {
      for (const Dtype weights : kDtypes) {
        for (const std::size_t max_part : {std::size_t{0}, std::size_t{256}}) {
          for (const bool has_base_bias : {false, true}) {
            Adapter adapter(config_, shapes, weights, max_part, rng_);
            LoraOperator lora(weights, GetParam());
            Matrix x = Matrix::random(19, 65, activations, rng_);
            Matrix y = Matrix::random(19, 257, activations, rng_);
            Matrix base_bias = Matrix::random(1, 257, activations, rng_);
            Matrix* given = has_base_bias ? &base_bias : nullptr;
            const Matrix before = y;
            apply(lora, batch_of({{adapter.pages(), 19}}), 0, x, y, given);
            EXPECT_EQ(num_wrong_of_module(GetParam(), adapter, kModule, x, before, y, given), 0);
          }
        }
      }
    }
  }
}

TEST_P(LoraVectorsTest, TheReferenceNoticesAWrongVectorAndADroppedBias) {
  Adapter adapter(config_, {shape_of(12, true, true)}, Dtype::float32, 0, rng_);
  LoraOperator lora(Dtype::float32, GetParam());
  Matrix x = Matrix::random(1, 65, Dtype::float32, rng_);
  Matrix y = Matrix::random(1, 257, Dtype::float32, rng_);
  Matrix base_bias = Matrix::random(1, 257, Dtype::float32, rng_);
  const Matrix before = y;
  apply(lora, batch_of({{adapter.pages(), 1}}), 0, x, y, &base_bias);
  const auto num_wrong = [&](const Adapter& reference, const Matrix* bias) {
    return num_wrong_of_module(GetParam(), reference, kModule, x, before, y, bias);
  };
  EXPECT_EQ(num_wrong(adapter, &base_bias), 0);
  EXPECT_GT(num_wrong(adapter, nullptr), 200);
  adapter.rows[0].dora_scale[3] *= 1.001F;
  EXPECT_EQ(num_wrong(adapter, &base_bias), 1);
  adapter.rows[0].dora_scale[3] /= 1.001F;
  adapter.rows[0].bias.clear();
  EXPECT_GT(num_wrong(adapter, &base_bias), 200);
}

TEST_P(LoraVectorsTest, ARowIsBitIdenticalAloneAndAmongNeighboursOfAnyKind) {
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
    Adapter dora(config_, kShapes[2], dtype, 256, rng_);
    Adapter plain(config_, {{kModule, 7}}, dtype, 0, rng_);
    Adapter biased(config_, kShapes[0], dtype, 0, rng_);
    LoraOperator lora(dtype, GetParam());
    Matrix x = Matrix::random(40, 65, dtype, rng_);
    Matrix base_bias = Matrix::random(1, 257, dtype, rng_);
    const Matrix before = Matrix::random(40, 257, dtype, rng_);
    Matrix together = before;
    apply(
        lora,
        batch_of({{dora.pages(), 18}, {plain.pages(), 5}, {std::nullopt, 1}, {biased.pages(), 16}}),
        0, x, together, &base_bias);
    for (std::uint32_t row = 0; row < 40; ++row) {
      if (row == 23) {
        EXPECT_EQ(together.row_bytes(row), before.row_bytes(row));
        continue;
      }
      Adapter& own = row < 18 ? dora : row < 23 ? plain : biased;
      Matrix x1 = x.pick({row}, dtype, 0);
      Matrix y1 = before.pick({row}, dtype, 0);
      apply(lora, batch_of({{own.pages(), 1}}), 0, x1, y1, &base_bias);
      EXPECT_EQ(y1.row_bytes(0), together.row_bytes(row)) << "row " << row;
    }
  }
}

// A DoRA scale of one changes nothing: DoRA of an untrained adapter is plain LoRA.
TEST_P(LoraVectorsTest, AScaleOfOneIsPlainLora) {
  Adapter adapter(config_, {shape_of(12, false, true)}, Dtype::float32, 0, rng_);
  const float one = 1.0F;
  for (const Part& part : adapter.layout().dora_scale_parts(0)) {
    for (std::uint32_t i = 0; i < part.length; ++i) {
      std::memcpy(adapter.pages().address(part.at) + i * sizeof(float), &one, sizeof(float));
    }
  }
  adapter.rows[0].dora_scale.clear();
  LoraOperator lora(Dtype::float32, GetParam());
  Matrix x = Matrix::random(3, 65, Dtype::float32, rng_);
  Matrix y = Matrix::random(3, 257, Dtype::float32, rng_);
  Matrix base_bias = Matrix::random(1, 257, Dtype::float32, rng_);
  const Matrix before = y;
  apply(lora, batch_of({{adapter.pages(), 3}}), 0, x, y, &base_bias);
  EXPECT_EQ(num_wrong_of_module(GetParam(), adapter, kModule, x, before, y), 0);
}

TEST(LoraVectorsBatchTest, SaysWhichModulesItsAdaptersTouch) {
  Rng rng(3);
  const LoraModelConfig config = config_of({{8, 8}, {8, 8}, {8, 8}});
  Adapter first(config, {{ModuleIndex{0}, 2}}, Dtype::float32, 0, rng);
  Adapter last(config, {{ModuleIndex{2}, 2}}, Dtype::float32, 0, rng);
  const auto touched = [](const LoraBatch& batch) {
    return std::vector<int>(batch.touched_modules().begin(), batch.touched_modules().end());
  };
  EXPECT_EQ(touched(batch_of({{std::nullopt, 1}})), std::vector<int>());
  EXPECT_EQ(touched(batch_of({{last.pages(), 1}})), (std::vector{0, 0, 1}));
  EXPECT_EQ(touched(batch_of({{first.pages(), 1}, {last.pages(), 1}})), (std::vector{1, 0, 1}));
}

TEST(LoraVectorsBatchTest, SaysWhetherAnyAdapterNeedsTheBaseBias) {
  Rng rng(3);
  const LoraModelConfig config = config_of({{8, 8}});
  Adapter plain(config, {shape_of(2, true, false)}, Dtype::float32, 0, rng);
  Adapter dora(config, {shape_of(2, false, true)}, Dtype::float32, 0, rng);
  EXPECT_FALSE(batch_of({{plain.pages(), 1}, {std::nullopt, 1}}).has_dora_scales());
  EXPECT_TRUE(batch_of({{plain.pages(), 1}, {dora.pages(), 1}}).has_dora_scales());
}

TEST(LoraVectorsLayoutTest, CountsAndPlacesThemAsFloat32) {
  const LoraModelConfig config = config_of({{64, 512}});
  const Layout plain(config, {{kModule, 8}}, {4096, 2, 0});
  const Layout layout(config, {shape_of(8, true, true)}, {4096, 2, 1024});
  EXPECT_EQ(layout.payload_bytes(), plain.payload_bytes() + 2 * 4 * 512);
  EXPECT_TRUE(plain.bias_parts(0).empty());
  EXPECT_TRUE(plain.dora_scale_parts(0).empty());
  std::uint32_t next = 0;
  for (const Part& part : layout.bias_parts(0)) {
    EXPECT_EQ(part.begin, next);
    EXPECT_LE(part.length * 4, 1024U);
    next += part.length;
  }
  EXPECT_EQ(next, 512U);
  EXPECT_EQ(layout.dora_scale_parts(0).size(), 2U);
}

TEST(LoraVectorsLayoutTest, OutputsWithADoraScaleBelongToOneRow) {
  const LoraModelConfig config = config_of({{64, 32}});
  const auto make = [&](bool has_dora_scale) {
    Layout(config,
           {{kModule, 2, {0, 32}, {}, false, has_dora_scale},
            {kModule, 2, {32, 32}, {}, false, false}},
           {4096, 2, 0});
  };
  EXPECT_NO_THROW(make(false));
  EXPECT_THROW(make(true), InvalidArgumentError);
}

// Entries name the vectors of their own outputs, also where parts of B reach over a vector's tile.
TEST(LoraVectorsEntriesTest, PointToTheVectorsOfTheirOutputs) {
  Rng rng(4);
  const LoraModelConfig config = config_of({{16, 700}});
  Adapter adapter(config, {shape_of(1, true, true)}, Dtype::bfloat16, 1024, rng);
  std::uint32_t seen = 0;
  for (const TaskLayerModuleConfig& entry : task_entries(adapter.pages(), config)) {
    const auto* b = std::bit_cast<const std::byte*>(entry.weights_out_pointer);
    const auto* bias = std::bit_cast<const std::byte*>(entry.bias_pointer);
    const auto* dora_scale = std::bit_cast<const std::byte*>(entry.scaling_vec_pointer);
    for (std::uint32_t o = 0; o < entry.out_size; ++o) {
      const std::uint32_t out = entry.out_offset + o;
      EXPECT_EQ(testing_support::load(bias + 4 * o, Dtype::float32), adapter.rows[0].bias[out]);
      EXPECT_EQ(testing_support::load(dora_scale + 4 * o, Dtype::float32),
                adapter.rows[0].dora_scale[out]);
      EXPECT_EQ(testing_support::load(b + 2 * o, Dtype::bfloat16), adapter.rows[0].b[out]);
      ++seen;
    }
  }
  EXPECT_EQ(seen, 700U);
}

}  // namespace
}  // namespace pagedlora
