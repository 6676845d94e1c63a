// "At least 99 % of the bytes of pages in use are adapter bytes on every fleet" (design 3.1).
#include "pagedlora/page_size_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "pagedlora/errors.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

struct ModelShape {
  const char* name;
  std::int64_t layers;
  std::int64_t hidden;
  std::int64_t q;
  std::int64_t kv;
  std::int64_t mlp;
};

constexpr ModelShape k135m{"135M", 30, 576, 576, 192, 1536};
constexpr ModelShape k500m{"500M", 24, 896, 896, 128, 4864};
constexpr ModelShape k8b{"8B", 32, 4096, 4096, 1024, 14336};
constexpr ModelShape k70b{"70B", 80, 8192, 8192, 1024, 28672};

LoraModelConfig model_of(const ModelShape& shape, Dtype dtype) {
  std::vector<LoraModule> modules;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, std::int64_t in, std::int64_t out) {
      modules.push_back({prefix + name, static_cast<std::int32_t>(layer), -1, in, out});
    };
    add("self_attn.q_proj", shape.hidden, shape.q);
    add("self_attn.k_proj", shape.hidden, shape.kv);
    add("self_attn.v_proj", shape.hidden, shape.kv);
    add("self_attn.o_proj", shape.q, shape.hidden);
    add("mlp.gate_proj", shape.hidden, shape.mlp);
    add("mlp.up_proj", shape.hidden, shape.mlp);
    add("mlp.down_proj", shape.mlp, shape.hidden);
  }
  return {std::move(modules), dtype, 128};
}

class PageSizeSearchTest : public ::testing::TestWithParam<std::tuple<ModelShape, Dtype>> {
 protected:
  const LoraModelConfig config_ = model_of(std::get<0>(GetParam()), std::get<1>(GetParam()));

  // The worst standard fleet's share of adapter bytes in its pages.
  double worst(const LayoutParams& params) const {
    double least = 1.0;
    for (const Fleet& fleet : standard_fleets(config_)) {
      least = std::min(least, utilisation(config_, fleet, params));
    }
    return least;
  }
};

TEST_P(PageSizeSearchTest, NinetyNinePercentOfPagesInUseAreAdapterBytesOnEveryFleet) {
  for (const std::size_t budget : {std::size_t{8} << 20, std::size_t{4} << 30}) {
    const LayoutParams params = search_layout_params(config_, budget);
    const double least = worst(params);
    EXPECT_GE(least, 0.99) << "page " << params.page_bytes << ", parts " << params.max_part_bytes;
    EXPECT_LE(least, 1.0);
    EXPECT_LE(params.page_bytes, budget / 4);
    EXPECT_EQ(params.page_bytes % kSlotBytes, 0U);
    RecordProperty("page_bytes", static_cast<int>(params.page_bytes));
  }
}

TEST_P(PageSizeSearchTest, NeverGoesOverAQuarterOfASmallBudget) {
  ModelShape two_layers = std::get<0>(GetParam());  // tiny pages make many parts
  two_layers.layers = 2;
  const LoraModelConfig config = model_of(two_layers, std::get<1>(GetParam()));
  for (const std::size_t budget : {4096U, 20'000U, 100'000U, 500'001U}) {
    const LayoutParams params = search_layout_params(config, budget);
    EXPECT_LE(params.page_bytes, budget / 4) << "budget " << budget;
    EXPECT_GT(params.page_bytes, 0U);
    EXPECT_NO_THROW(Layout(config, {{ModuleIndex{0}, 8}}, params)) << "budget " << budget;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PageSizeSearchTest,
                         ::testing::Combine(::testing::Values(k135m, k500m, k8b, k70b),
                                            ::testing::Values(Dtype::bfloat16, Dtype::float32)),
                         [](const auto& instance) {
                           return std::string(std::get<0>(instance.param).name) + "_" +
                                  std::string(dtype_name(std::get<1>(instance.param)));
                         });

TEST(PageSizeSearchFleetsTest, AreFourRankListsOnThreeTargetLists) {
  const LoraModelConfig config = model_of(k135m, Dtype::bfloat16);
  const std::vector<Fleet> fleets = standard_fleets(config);
  ASSERT_EQ(fleets.size(), 12U);
  std::vector<std::size_t> rows;
  for (const Fleet& fleet : fleets) {
    rows.push_back(fleet.front().size());
  }
  EXPECT_EQ(std::vector(rows.begin(), rows.begin() + 3), (std::vector<std::size_t>{60, 120, 210}));
  EXPECT_EQ(fleets.back().front().front().rank, 8U);
  EXPECT_EQ(fleets.back().back().front().rank, 128U);
}

TEST(PageSizeSearchFleetsTest, LeaveOutTargetsThatTheModelLacks) {
  const LoraModelConfig config({{"lm_head", -1, -1, 64, 128}}, Dtype::bfloat16, 8);
  EXPECT_EQ(standard_fleets(config).size(), 4U);
  const LayoutParams params = search_layout_params(config, 1U << 20);
  EXPECT_LE(params.page_bytes, (1U << 20) / 4);
}

TEST(PageSizeSearchFleetsTest, UtilisationIsPayloadOverPages) {
  const LoraModelConfig config({{"a", -1, -1, 32, 16}}, Dtype::bfloat16, 8);
  // 768 bytes of weights in a page of 1024, and a half of that for rank 4.
  const LayoutParams params{1024, 2, 0};
  EXPECT_DOUBLE_EQ(utilisation(config, {{{ModuleIndex{0}, 8}}}, params), 0.75);
  EXPECT_DOUBLE_EQ(utilisation(config, {{{ModuleIndex{0}, 8}}, {{ModuleIndex{0}, 4}}}, params),
                   (768.0 + 384.0) / 2048.0);
}

TEST(PageSizeSearchFleetsTest, ABudgetWithoutRoomForPagesIsRefused) {
  const LoraModelConfig config({{"lm_head", -1, -1, 64, 128}}, Dtype::bfloat16, 8);
  EXPECT_THROW(search_layout_params(config, 0), InvalidArgumentError);
  const auto error =
      testing_support::thrown_by<InvalidArgumentError>([&] { search_layout_params(config, 255); });
  ASSERT_TRUE(error);
  EXPECT_STREQ(error->what(),
               "a tier of 255 bytes is too small for pages; give each at least 256 bytes");
  EXPECT_NO_THROW(search_layout_params(config, 256));
}

}  // namespace
}  // namespace pagedlora
