#include "internal/attention_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "paged_attention_fixture.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using attention_test::kInfinity;
using testing_support::usable_isas;

// The weight of a logit x <= 0 next to a running maximum of 0 is exp(x).
float weight_of(const internal::AttentionKernels& kernels, float logit, float softcap = 0.0F) {
  float scores[internal::kKeyTile] = {logit};
  float sums[internal::kLanes] = {};
  float maximum = 0.0F;
  float rescale = 0.0F;
  kernels.softmax({scores, &maximum, sums, &rescale, 1, 0, 1, 1.0F, softcap});
  return scores[0];
}

TEST(AttentionKernels, exp_is_within_two_ulp) {
  for (const Isa isa : usable_isas()) {
    const internal::AttentionKernels& kernels = internal::attention_kernels(isa, Dtype::float32);
    double worst = 0.0;
    for (std::uint32_t bits = 0x80000000U; bits < std::bit_cast<std::uint32_t>(-110.0F);
         bits += 1013) {
      const float x = std::bit_cast<float>(bits);
      const double exact = std::exp(double{x});
      const auto near = static_cast<float>(exact);
      const double ulp = double{std::nextafter(near, 2.0F)} - double{near};
      worst = std::max(worst, std::abs(double{weight_of(kernels, x)} - exact) / ulp);
    }
    EXPECT_LE(worst, 2.0) << isa_name(isa);
    EXPECT_EQ(weight_of(kernels, 0.0F), 1.0F);
    EXPECT_EQ(weight_of(kernels, -kInfinity), 0.0F);
    EXPECT_TRUE(std::isnan(weight_of(kernels, std::nanf(""))));
    RecordProperty(std::string("exp_ulp_") + std::string(isa_name(isa)), std::to_string(worst));
  }
}

TEST(AttentionKernels, softcap_follows_tanh) {
  for (const Isa isa : usable_isas()) {
    const internal::AttentionKernels& kernels = internal::attention_kernels(isa, Dtype::float32);
    for (float x = 0.0F; x > -40.0F; x -= 0.0137F) {
      const double expected = std::exp(3.0 * std::tanh(double{x} / 3.0));
      EXPECT_NEAR(double{weight_of(kernels, x, 3.0F)}, expected, 6e-7 * expected) << x;
    }
  }
}

}  // namespace
}  // namespace pagedlora
