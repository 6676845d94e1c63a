// dtype.h against an independent reference in double arithmetic.
#include "pagedlora/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "float_environment.h"

namespace pagedlora {
namespace {

// A binary format of 16 bits with `mantissa_bits`, one sign bit and the rest exponent.
struct Format {
  int mantissa_bits;

  int exponent_bits() const { return 15 - mantissa_bits; }
  int bias() const { return (1 << (exponent_bits() - 1)) - 1; }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits()) - 1) << mantissa_bits);
  }
};

constexpr Format kFloat16{10};
constexpr Format kBfloat16{7};

bool is_nan_bits(std::uint16_t bits, const Format& format) {
  return (bits & 0x7FFF) > format.infinity();
}

// The value of finite or infinite `bits`.
double decode(std::uint16_t bits, const Format& format) {
  const int exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if ((bits & 0x7FFF) == format.infinity()) {
    return sign * std::numeric_limits<double>::infinity();
  }
  const int hidden = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = std::max(exponent, 1) - format.bias() - format.mantissa_bits;
  return sign * std::ldexp(hidden + mantissa, scale);
}

// To nearest, ties to even, in double: every step is exact but the rounding itself.
std::uint16_t encode(float value, const Format& format) {
  if (std::isnan(value)) {
    return 0x7FFF;
  }
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) {
    return sign | format.infinity();
  }
  const int smallest = 1 - format.bias();
  const int exponent = magnitude == 0 ? smallest : std::max(std::ilogb(magnitude), smallest);
  const double units = std::ldexp(magnitude, format.mantissa_bits - exponent);
  double rounded = std::floor(units);
  const double rest = units - rounded;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(rounded, 2.0) == 1.0)) {
    rounded += 1;
  }
  // A mantissa that overflows carries into the exponent, up to infinity.
  const auto bits = static_cast<std::int64_t>(rounded) +
                    (static_cast<std::int64_t>(exponent - smallest) << format.mantissa_bits);
  return static_cast<std::uint16_t>(sign | std::min<std::int64_t>(bits, format.infinity()));
}

// Float32 bit patterns: random ones, and the neighbourhoods of everything that is special.
std::vector<std::uint32_t> sample_bits() {
  std::vector<std::uint32_t> samples;
  for (std::uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x0FFFU, 0x1000U, 0x1001U, 0x2FFFU, 0x3000U,
                                    0x7FFFU, 0x8000U, 0x8001U, 0xF000U, 0xFFFFU}) {
      samples.push_back(high << 16 | low);
    }
  }
  std::mt19937 random(20240611);
  for (int i = 0; i < 1'000'000; ++i) {
    samples.push_back(static_cast<std::uint32_t>(random()));
  }
  return samples;
}

template <class Element>
void expect_exact_widening(const Format& format) {
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float wide = widen(Element{bits});
    if (is_nan_bits(bits, format)) {
      ASSERT_TRUE(std::isnan(wide)) << i;
      ASSERT_EQ(narrow<Element>(wide).bits, 0x7FFF) << i;
    } else {
      ASSERT_EQ(static_cast<double>(wide), decode(bits, format)) << i;
      ASSERT_EQ(std::signbit(wide), (bits & 0x8000) != 0) << i;
      ASSERT_EQ(narrow<Element>(wide).bits, bits) << i;
    }
  }
}

TEST(DtypeTest, NamesAndSizes) {
  EXPECT_EQ(element_bytes(Dtype::float32), 4U);
  EXPECT_EQ(element_bytes(Dtype::float16), 2U);
  EXPECT_EQ(element_bytes(Dtype::bfloat16), 2U);
  EXPECT_EQ(dtype_name(Dtype::float32), "float32");
  EXPECT_EQ(dtype_name(Dtype::float16), "float16");
  EXPECT_EQ(dtype_name(Dtype::bfloat16), "bfloat16");
}

TEST(DtypeTest, EveryFloat16WidensExactlyAndNarrowsBack) {
  expect_exact_widening<Float16>(kFloat16);
}

TEST(DtypeTest, EveryBfloat16WidensExactlyAndNarrowsBack) {
  expect_exact_widening<Bfloat16>(kBfloat16);
}

TEST(DtypeTest, NarrowingRoundsToNearestEven) {
  for (const std::uint32_t bits : sample_bits()) {
    const float value = std::bit_cast<float>(bits);
    ASSERT_EQ(narrow<Float16>(value).bits, encode(value, kFloat16)) << std::hex << bits;
    ASSERT_EQ(narrow<Bfloat16>(value).bits, encode(value, kBfloat16)) << std::hex << bits;
  }
}

TEST(DtypeTest, OnlyFiniteValuesOverflow) {
  for (const std::uint32_t bits : sample_bits()) {
    const float value = std::bit_cast<float>(bits);
    const bool became_infinite = (encode(value, kFloat16) & 0x7FFF) == kFloat16.infinity();
    ASSERT_EQ(overflows_float16(value), std::isfinite(value) && became_infinite)
        << std::hex << bits;
  }
  EXPECT_FALSE(overflows_float16(65519.996F));
  EXPECT_TRUE(overflows_float16(65520.0F));
  EXPECT_TRUE(overflows_float16(-65520.0F));
}

TEST(DtypeTest, Float32KeepsItsBitsButForNan) {
  for (const std::uint32_t bits : sample_bits()) {
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const float value = std::bit_cast<float>(bits);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(narrow<float>(value)), is_nan ? 0x7FFFFFFFU : bits);
  }
}

// torch.set_flush_denormal changes the mode of the threads that call us.
TEST(DtypeTest, FlushModesChangeNothing) {
  const std::vector<std::uint32_t> samples = sample_bits();
  std::vector<std::uint32_t> halves;  // expected, computed before the mode changes
  for (const std::uint32_t bits : samples) {
    const float value = std::bit_cast<float>(bits);
    halves.push_back(std::uint32_t{encode(value, kFloat16)} << 16 | encode(value, kBfloat16));
  }
  std::vector<std::uint32_t> wide;
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    wide.push_back(std::bit_cast<std::uint32_t>(widen(Float16{static_cast<std::uint16_t>(i)})));
  }
  const testing_support::FlushSubnormals flush;
  if (!flush.is_active()) {
    GTEST_SKIP() << "no control over flush modes on this processor";
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const float value = std::bit_cast<float>(samples[i]);
    const std::uint32_t got =
        std::uint32_t{narrow<Float16>(value).bits} << 16 | narrow<Bfloat16>(value).bits;
    ASSERT_EQ(got, halves[i]) << std::hex << samples[i];
  }
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const float value = widen(Float16{static_cast<std::uint16_t>(i)});
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), wide[i]) << i;
  }
}

}  // namespace
}  // namespace pagedlora
