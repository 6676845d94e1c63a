#include "internal/value_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pagedlora::internal {
namespace {

// Bits without the sign are in the order of the magnitudes, infinity and NaN last. Signed, because
// that is what every processor compares many of at a time.
template <class Bits>
Bits largest_magnitude(const std::byte* values, std::size_t count, Bits mask) {
  Bits largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i * sizeof(Bits), sizeof(Bits));
    largest = std::max(largest, static_cast<Bits>(bits & mask));
  }
  return largest;
}

template <class Bits>
ValueProblem judge(Bits largest, Bits infinity, Bits over) {
  if (largest >= infinity) {
    return ValueProblem::not_finite;
  }
  return largest >= over ? ValueProblem::over_range : ValueProblem::none;
}

}  // namespace

ValueProblem find_problem(const std::byte* values, std::size_t count, Dtype source, Dtype target) {
  if (source == Dtype::float32) {
    constexpr std::int32_t kInfinity = 0x7F800000;
    // Half-way between the last value of the type and the next power of two: ties go to that.
    const std::int32_t over = target == Dtype::float16    ? 0x477FF000
                              : target == Dtype::bfloat16 ? 0x7F7F8000
                                                          : kInfinity;
    return judge(largest_magnitude<std::int32_t>(values, count, 0x7FFFFFFF), kInfinity, over);
  }
  const std::int16_t infinity = source == Dtype::bfloat16 ? 0x7F80 : 0x7C00;
  // 65280 is the last bfloat16 that is finite in float16.
  const std::int16_t over =
      source == Dtype::bfloat16 && target == Dtype::float16 ? std::int16_t{0x4780} : infinity;
  return judge(largest_magnitude<std::int16_t>(values, count, 0x7FFF), infinity, over);
}

}  // namespace pagedlora::internal
