#include "pagedlora/lora_operator.h"
#include "all_dtypes.h"

#include <gtest/gtest.h>

#include <limits>

#include "lora_operator_fixture.h"
#include "lora_rounding.h"
#include "pagedlora/errors.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using testing_support::Adapter;
using testing_support::apply;
using testing_support::batch_of;
using testing_support::config_of;
using testing_support::kDtypes;
using testing_support::Matrix;
using testing_support::Rng;
using testing_support::rounding_bound;
using testing_support::unit_roundoff;
using testing_support::usable_isas;

constexpr std::uint32_t kRanks[] = {1, 2, 3, 5, 8, 12, 16, 31, 33, 64};
constexpr std::pair<std::uint32_t, std::uint32_t> kSizes[] = {
    {1, 1}, {1, 577}, {7, 17}, {17, 7}, {33, 33}, {33, 577}, {577, 1}, {577, 33}, {577, 577}};

// How many elements of `after` are further from a float64 evaluation than rounding explains.
int num_wrong(Isa isa, const Adapter& adapter, std::uint32_t row, const Matrix& x,
              const Matrix& before, const Matrix& after) {
  const Adapter::Row& weights = adapter.rows[row];
  const double scale = adapter.scales[row];
  const double bound = rounding_bound(adapter.layout(), row, isa);
  int wrong = 0;
  for (std::uint32_t token = 0; token < x.rows(); ++token) {
    std::vector<double> t(weights.rank);
    std::vector<double> t_magnitude(weights.rank);
    for (std::uint32_t rank = 0; rank < weights.rank; ++rank) {
      for (std::uint32_t i = 0; i < weights.in; ++i) {
        const double term = scale * weights.a[rank * weights.in + i] * x.get(token, i);
        t[rank] += term;
        t_magnitude[rank] += std::abs(term);
      }
    }
    for (std::uint32_t o = 0; o < weights.out; ++o) {
      double exact = before.get(token, o);
      double magnitude = std::abs(exact);
      for (std::uint32_t rank = 0; rank < weights.rank; ++rank) {
        const double b = weights.b[o * weights.rank + rank];
        exact += b * t[rank];
        magnitude += std::abs(b) * t_magnitude[rank];
      }
      const double before_narrowing = bound * magnitude;
      const double narrowing =
          x.dtype() == Dtype::float32
              ? 0
              : unit_roundoff(x.dtype()) * (std::abs(exact) + before_narrowing) + 0x1p-25;
      const double error = std::abs(after.get(token, o) - exact);
      wrong += !(error <= before_narrowing + narrowing);
    }
  }
  return wrong;
}

struct Case {
  Dtype activations;
  Dtype weights;
  Isa isa;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Isa isa : usable_isas()) {
    for (const Dtype activations : kDtypes) {
      for (const Dtype weights : kDtypes) {
        cases.push_back({activations, weights, isa});
      }
    }
  }
  return cases;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  std::string name(dtype_name(info.param.activations));
  name.append("_by_").append(dtype_name(info.param.weights));
  return name.append("_").append(isa_name(info.param.isa));
}

class LoraOperatorTest : public testing::TestWithParam<Case> {
 protected:
  Adapter one_row_adapter(std::uint32_t in, std::uint32_t out, std::uint32_t rank,
                          std::size_t features_per_part = 0) {
    const std::size_t feature_bytes = kMaxBlockRanks * element_bytes(GetParam().weights);
    return Adapter(config_of({{in, out}}), {{ModuleIndex{0}, rank}}, GetParam().weights,
                   features_per_part * feature_bytes, rng_);
  }
  Matrix random(std::uint32_t rows, std::uint32_t features) {
    return Matrix::random(rows, features, GetParam().activations, rng_);
  }

  Rng rng_{1};
  LoraOperator lora_{GetParam().weights, GetParam().isa};
};

INSTANTIATE_TEST_SUITE_P(All, LoraOperatorTest, testing::ValuesIn(all_cases()), case_name);

TEST_P(LoraOperatorTest, AgreesWithFloat64ForAllSizesRanksAndTilings) {
  for (const auto& [in, out] : kSizes) {
    for (const std::uint32_t rank : kRanks) {
      for (const std::size_t features_per_part : {0, 5, 40}) {
        if (features_per_part > std::max(in, out)) {
          continue;
        }
        Adapter adapter = one_row_adapter(in, out, rank, features_per_part);
        Matrix x = random(3, in);
        Matrix y = random(3, out);
        const Matrix before = y;
        apply(lora_, batch_of({{adapter.pages(), 3}}), 0, x, y);
        EXPECT_EQ(num_wrong(GetParam().isa, adapter, 0, x, before, y), 0)
            << "in " << in << " out " << out << " rank " << rank << " tiled by "
            << features_per_part;
      }
    }
  }
}

TEST_P(LoraOperatorTest, TheErrorBoundNoticesAScaleThatIsOffByAPart) {
  Adapter adapter = one_row_adapter(577, 33, 12);
  Matrix x = random(3, 577);
  Matrix y = random(3, 33);
  const Matrix before = y;
  apply(lora_, batch_of({{adapter.pages(), 3}}), 0, x, y);
  adapter.scales[0] *= GetParam().activations == Dtype::float32 ? 1.001F : 1.1F;
  EXPECT_GT(num_wrong(GetParam().isa, adapter, 0, x, before, y), 20);
}

TEST_P(LoraOperatorTest, WideOutputsAgreeWithFloat64) {
  Adapter adapter = one_row_adapter(17, 5003, 11, 1000);
  Matrix x = random(19, 17);
  Matrix y = random(19, 5003);
  const Matrix before = y;
  apply(lora_, batch_of({{adapter.pages(), 19}}), 0, x, y);
  EXPECT_EQ(num_wrong(GetParam().isa, adapter, 0, x, before, y), 0);
}

TEST_P(LoraOperatorTest, ARowIsBitIdenticalAloneAndInARunOfAnyLength) {
  using Shape = std::pair<std::uint32_t, std::size_t>;
  for (const auto& [rank, features_per_part] : {Shape{21, 0}, {21, 40}, {12, 0}, {10, 40}}) {
    Adapter adapter = one_row_adapter(577, 129, rank, features_per_part);
    Matrix x = random(37, 577);
    const Matrix before = random(37, 129);
    Matrix alone = before;
    for (std::uint32_t row = 0; row < 37; ++row) {
      Matrix x1 = x.pick({row}, x.dtype(), 0);
      Matrix y1 = before.pick({row}, x.dtype(), 0);
      apply(lora_, batch_of({{adapter.pages(), 1}}), 0, x1, y1);
      for (std::uint32_t o = 0; o < 129; ++o) {
        alone.set(row, o, y1.get(0, o));
      }
    }
    for (const std::uint32_t length : {2U, 3U, 15U, 16U, 17U, 37U}) {
      std::vector<std::uint32_t> rows(length);
      std::iota(rows.begin(), rows.end(), 37 - length);
      Matrix xs = x.pick(rows, x.dtype(), 5);
      Matrix ys = before.pick(rows, x.dtype(), 5);
      apply(lora_, batch_of({{adapter.pages(), length}}), 0, xs, ys);
      EXPECT_EQ(ys.bytes(), alone.pick(rows, x.dtype(), 5).bytes())
          << "rank " << rank << ", run of " << length;
    }
  }
}

TEST_P(LoraOperatorTest, ActivationsOfSixteenBitsDifferOnlyInTheLastRounding) {
  for (const std::uint32_t rank : kRanks) {
    Adapter adapter = one_row_adapter(97, 77, rank, 40);
    Matrix x = random(5, 97);
    Matrix y = random(5, 77);
    Matrix wide_x = x.as(Dtype::float32);
    Matrix wide_y = y.as(Dtype::float32);
    const LoraBatch batch = batch_of({{adapter.pages(), 5}});
    apply(lora_, batch, 0, x, y);
    apply(lora_, batch, 0, wide_x, wide_y);
    EXPECT_EQ(y.bytes(), wide_y.as(y.dtype()).bytes()) << "rank " << rank;
  }
}

TEST_P(LoraOperatorTest, EachRunGetsItsOwnAdapterAndBaseRowsAreNeitherReadNorWritten) {
  const LoraModelConfig config = config_of({{33, 17}, {33, 40}, {7, 9}});
  const Dtype weights = GetParam().weights;
  Adapter first(config, {{ModuleIndex{0}, 5}, {ModuleIndex{1}, 9}}, weights, 0, rng_);
  Adapter second(config, {{ModuleIndex{1}, 16}}, weights, 0, rng_);
  Adapter elsewhere(config, {{ModuleIndex{2}, 8}}, weights, 0, rng_);
  const LoraBatch batch = batch_of({{std::nullopt, 2},
                                    {first.pages(), 3},
                                    {elsewhere.pages(), 1},
                                    {second.pages(), 2},
                                    {std::nullopt, 1},
                                    {first.pages(), 1}});
  Matrix x = random(10, 33);
  for (const std::uint32_t base_row : {0U, 1U, 5U, 8U}) {
    for (std::uint32_t i = 0; i < 33; ++i) {
      x.set(base_row, i, std::numeric_limits<float>::quiet_NaN());
    }
  }
  Matrix y = random(10, 40);
  const Matrix before = y;
  apply(lora_, batch, 1, x, y);

  Matrix expected = before;
  const auto expect_rows = [&](Adapter& adapter, std::vector<std::uint32_t> rows) {
    Matrix xs = x.pick(rows, x.dtype(), 0);
    Matrix ys = before.pick(rows, x.dtype(), 0);
    const Matrix ys_before = ys;
    apply(lora_, batch_of({{adapter.pages(), static_cast<std::uint32_t>(rows.size())}}), 1, xs, ys);
    const std::uint32_t row = adapter.layout().rows_of(ModuleIndex{1}).first;
    EXPECT_EQ(num_wrong(GetParam().isa, adapter, row, xs, ys_before, ys), 0);
    for (std::uint32_t i = 0; i < rows.size(); ++i) {
      EXPECT_NE(ys.row_bytes(i), ys_before.row_bytes(i));
      for (std::uint32_t o = 0; o < 40; ++o) {
        expected.set(rows[i], o, ys.get(i, o));
      }
    }
  };
  expect_rows(first, {2, 3, 4, 9});
  expect_rows(second, {6, 7});
  EXPECT_EQ(y.bytes(), expected.bytes());
}

TEST_P(LoraOperatorTest, AModuleThatNoAdapterTouchesLeavesEverythingAlone) {
  const LoraModelConfig config = config_of({{33, 17}, {33, 17}});
  Adapter adapter(config, {{ModuleIndex{0}, 5}}, GetParam().weights, 0, rng_);
  Matrix x = random(2, 33);
  Matrix y = random(2, 17);
  const Matrix before = y;
  apply(lora_, batch_of({{adapter.pages(), 2}}), 1, x, y);
  EXPECT_EQ(y.bytes(), before.bytes());
}

TEST_P(LoraOperatorTest, NanBecomesCanonicalAndInfinityStays) {
  Adapter adapter = one_row_adapter(1, 19, 1);
  Matrix x = random(2, 1);
  Matrix y = random(2, 19);
  const Dtype dtype = y.dtype();
  x.set(0, 0, 0.0F);
  x.set(1, 0, -std::numeric_limits<float>::quiet_NaN());
  y.set(0, 18, std::numeric_limits<float>::infinity());
  apply(lora_, batch_of({{adapter.pages(), 2}}), 0, x, y);
  EXPECT_EQ(y.get(0, 18), std::numeric_limits<float>::infinity());
  std::vector<std::byte> canonical(element_bytes(dtype), std::byte{0xFF});
  canonical.back() = std::byte{0x7F};
  for (std::uint32_t o = 0; o < 19; ++o) {
    const std::vector<std::byte> row = y.row_bytes(1);
    const auto at = row.begin() + static_cast<std::ptrdiff_t>(o * canonical.size());
    EXPECT_TRUE(std::equal(canonical.begin(), canonical.end(), at));
  }
}

TEST_P(LoraOperatorTest, AnInfiniteWeightOfBReachesOnlyItsOwnOutput) {
  for (const std::uint32_t rank : {1U, 2U, 3U, 4U, 5U, 7U, 8U}) {
    Adapter adapter = one_row_adapter(33, 43, rank);
    Matrix x = random(3, 33);
    const Matrix before = random(3, 43);
    Matrix clean = before;
    const LoraBatch batch = batch_of({{adapter.pages(), 3}});
    apply(lora_, batch, 0, x, clean);
    for (const std::uint32_t out : {1U, 9U, 40U}) {
      const Part& b = adapter.layout().b_parts(adapter.layout().blocks().front()).front();
      std::byte* weight =
          adapter.pages().address(b.at) + out * rank * element_bytes(GetParam().weights);
      const float value = testing_support::load(weight, GetParam().weights);
      testing_support::store(weight, GetParam().weights, std::numeric_limits<float>::infinity());
      Matrix y = before;
      apply(lora_, batch, 0, x, y);
      testing_support::store(weight, GetParam().weights, value);
      for (std::uint32_t row = 0; row < 3; ++row) {
        EXPECT_FALSE(std::isfinite(y.get(row, out)));
        y.set(row, out, clean.get(row, out));
      }
      EXPECT_EQ(y.bytes(), clean.bytes()) << "rank " << rank << ", output " << out;
    }
  }
}

TEST_P(LoraOperatorTest, SubnormalActivationsAreKept) {
  const float smallest = GetParam().activations == Dtype::float16    ? 0x1p-24F
                         : GetParam().activations == Dtype::bfloat16 ? 0x1p-133F
                                                                     : 0x1p-149F;
  Adapter adapter = one_row_adapter(1, 19, 1);
  Matrix x = random(1, 1);
  Matrix y = random(1, 19);
  x.set(0, 0, 0.0F);
  for (std::uint32_t o = 0; o < 19; ++o) {
    y.set(0, o, smallest * static_cast<float>(o));
  }
  const Matrix before = y;
  apply(lora_, batch_of({{adapter.pages(), 1}}), 0, x, y);
  EXPECT_EQ(y.bytes(), before.bytes());
}

TEST_P(LoraOperatorTest, MisuseThrowsAndChangesNothing) {
  Adapter adapter = one_row_adapter(33, 17, 4);
  Matrix x = random(3, 33);
  Matrix y = random(3, 17);
  const Matrix before = y;
  EXPECT_THROW(apply(lora_, batch_of({{adapter.pages(), 2}}), 0, x, y), InvalidArgumentError);
  const bool wide = GetParam().weights == Dtype::float32;
  LoraOperator other(wide ? Dtype::bfloat16 : Dtype::float32, GetParam().isa);
  EXPECT_THROW(apply(other, batch_of({{adapter.pages(), 3}}), 0, x, y), InvalidArgumentError);
  EXPECT_EQ(y.bytes(), before.bytes());
}

TEST(LoraBatchTest, NeighbouringSegmentsOfOneTaskBecomeOneRun) {
  Rng rng(1);
  const LoraModelConfig config = config_of({{8, 8}});
  Adapter first(config, {{ModuleIndex{0}, 4}}, Dtype::float32, 0, rng);
  Adapter second(config, {{ModuleIndex{0}, 4}}, Dtype::float32, 0, rng);
  const LoraBatch batch = batch_of({{std::nullopt, 1},
                                    {first.pages(), 2},
                                    {second.pages(), 0},
                                    {first.pages(), 3},
                                    {second.pages(), 1},
                                    {std::nullopt, 2},
                                    {second.pages(), 1}});
  EXPECT_EQ(batch.num_rows(), 10U);
  ASSERT_EQ(batch.runs().size(), 3U);
  EXPECT_EQ(batch.runs()[0].first_row, 1U);
  EXPECT_EQ(batch.runs()[0].num_rows, 5U);
  EXPECT_EQ(batch.runs()[0].task.pages, first.pages().pages);
  EXPECT_EQ(batch.runs()[1].first_row, 6U);
  EXPECT_EQ(batch.runs()[1].num_rows, 1U);
  EXPECT_EQ(batch.runs()[2].first_row, 9U);
}

TEST(LoraBatchTest, TasksThatDifferOnlyInPagesOrLayoutOrPoolStayApart) {
  Rng rng(1);
  const LoraModelConfig config = config_of({{8, 8}});
  Adapter adapter(config, {{ModuleIndex{0}, 4}}, Dtype::float32, 0, rng);
  Adapter same_shape(config, {{ModuleIndex{0}, 4}}, Dtype::float32, 0, rng);
  const TaskPages task = adapter.pages();
  TaskPages other_pages = task;
  other_pages.pages = same_shape.pages().pages;
  TaskPages other_layout = task;
  other_layout.layout = same_shape.pages().layout;
  TaskPages other_pool = task;
  other_pool.base = same_shape.pages().base;
  for (const TaskPages& other : {other_pages, other_layout, other_pool}) {
    EXPECT_EQ(batch_of({{task, 1}, {other, 1}}).runs().size(), 2U);
  }
}

TEST(LoraBatchTest, RefusesATaskWithoutALayout) {
  EXPECT_THROW(batch_of({{TaskPages{}, 1}}), InvalidArgumentError);
}

TEST(LoraOperatorIsaTest, TakesWhatCanRunHereAndRefusesTheRest) {
  for (const Isa isa : kIsas) {
    const auto make = [isa] { LoraOperator(Dtype::float32, isa); };
    if (isa <= best_isa()) {
      EXPECT_NO_THROW(make());
    } else {
      EXPECT_THROW(make(), InvalidArgumentError);
    }
  }
}

}  // namespace
}  // namespace pagedlora
