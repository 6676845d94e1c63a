#include "internal/value_check.h"
#include "all_dtypes.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace pagedlora::internal {
namespace {

using testing_support::kDtypes;

bool is_finite_in(float value, Dtype target) {
  switch (target) {
    case Dtype::float32:
      return std::isfinite(value);
    case Dtype::float16:
      return std::isfinite(widen(narrow<Float16>(value)));
    case Dtype::bfloat16:
      return std::isfinite(widen(narrow<Bfloat16>(value)));
  }
  return false;
}

ValueProblem expected(float value, Dtype target) {
  if (!std::isfinite(value)) {
    return ValueProblem::not_finite;
  }
  return is_finite_in(value, target) ? ValueProblem::none : ValueProblem::over_range;
}

template <class Stored>
ValueProblem found(Stored value, Dtype source, Dtype target) {
  return find_problem(reinterpret_cast<const std::byte*>(&value), 1, source, target);
}

TEST(ValueCheck, judges_every_value_of_two_bytes) {
  for (const Dtype target : kDtypes) {
    for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      ASSERT_EQ(found(half, Dtype::float16, target), expected(widen(Float16{half}), target))
          << bits;
      ASSERT_EQ(found(half, Dtype::bfloat16, target), expected(widen(Bfloat16{half}), target))
          << bits;
    }
  }
}

TEST(ValueCheck, judges_float32_at_every_limit) {
  std::mt19937 rng(1);
  std::vector<std::uint32_t> patterns = {0, 1, 0x7FFFFF, 0x800000};
  for (const std::uint32_t limit : {0x477FE000U, 0x477FF000U, 0x7F7F8000U, 0x7F800000U}) {
    for (std::uint32_t bits = limit - 3; bits <= limit + 3; ++bits) {
      patterns.push_back(bits);
    }
  }
  for (int i = 0; i < 100000; ++i) {
    patterns.push_back(static_cast<std::uint32_t>(rng()));
  }
  for (const Dtype target : kDtypes) {
    for (const std::uint32_t pattern : patterns) {
      for (const std::uint32_t sign : {0U, 0x80000000U}) {
        const std::uint32_t bits = pattern ^ sign;
        ASSERT_EQ(found(bits, Dtype::float32, target), expected(std::bit_cast<float>(bits), target))
            << std::hex << bits;
      }
    }
  }
}

TEST(ValueCheck, finds_one_of_many_at_any_place_and_alignment) {
  constexpr std::size_t kCount = 70;
  for (std::size_t offset = 0; offset < 5; ++offset) {
    for (std::size_t place = 0; place < kCount; ++place) {
      std::vector<std::byte> bytes(offset + kCount * sizeof(float));
      const float value = -std::numeric_limits<float>::infinity();
      std::byte* values = bytes.data() + offset;
      EXPECT_EQ(find_problem(values, kCount, Dtype::float32, Dtype::float16), ValueProblem::none);
      std::memcpy(values + place * sizeof(float), &value, sizeof(float));
      EXPECT_EQ(find_problem(values, kCount, Dtype::float32, Dtype::float16),
                ValueProblem::not_finite);
      EXPECT_EQ(find_problem(values, place, Dtype::float32, Dtype::float16), ValueProblem::none);
    }
  }
}

}  // namespace
}  // namespace pagedlora::internal
