// Element types of weights and activations, and the exact conversions between them.
//
// The conversions are a specification, not an optimisation: every executor (portable, AVX2,
// AVX-512, CUDA) must give the same bits. Values are widened exactly to float32 and narrowed to
// nearest, ties to even; subnormals are kept; a NaN becomes the canonical quiet NaN of the target
// (all exponent and mantissa bits set, sign cleared); a finite value beyond float16's range becomes
// infinity here and is refused by whoever stores adapter weights.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "pagedlora/host_device.h"

namespace pagedlora {

enum class Dtype : std::uint8_t { float32, float16, bfloat16 };

PAGEDLORA_HOST_DEVICE constexpr std::size_t element_bytes(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

constexpr std::string_view dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
      return "float32";
    case Dtype::float16:
      return "float16";
    case Dtype::bfloat16:
      return "bfloat16";
  }
  return "unknown";
}

struct Bfloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

namespace internal {
inline constexpr std::uint32_t kFloat32ExponentMask = 0x7F800000U;
inline constexpr std::uint32_t kFloat32AbsMask = 0x7FFFFFFFU;

// std::bit_cast, which nvcc lets a kernel call only with an experimental flag.
template <class To, class From>
PAGEDLORA_HOST_DEVICE constexpr To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}
}  // namespace internal

PAGEDLORA_HOST_DEVICE inline float widen(float value) { return value; }

PAGEDLORA_HOST_DEVICE inline float widen(Bfloat16 value) {
  return internal::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

PAGEDLORA_HOST_DEVICE inline float widen(Float16 value) {
#if defined(__CUDA_ARCH__)
  // Exact, too, in one instruction where what follows takes nine. A NaN loses its payload, which no
  // kernel shows: narrow() knows one NaN.
  float widened;
  asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(value.bits));
  return widened;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = value.bits & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity or NaN: the payload moves up unchanged
    return internal::bit_cast<float>(sign | internal::kFloat32ExponentMask |
                                     ((magnitude & 0x3FFU) << 13));
  }
  if (magnitude >= 0x0400U) {  // normal: rebias the exponent from 15 to 127
    return internal::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
  }
  // Subnormal: an integer multiple of 2^-24, exact in float32.
  const float scaled = static_cast<float>(magnitude) * 0x1p-24F;
  return internal::bit_cast<float>(sign | internal::bit_cast<std::uint32_t>(scaled));
#endif
}

template <class To>
PAGEDLORA_HOST_DEVICE To narrow(float value);

template <>
PAGEDLORA_HOST_DEVICE inline float narrow<float>(float value) {
  const std::uint32_t bits = internal::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & internal::kFloat32AbsMask) > internal::kFloat32ExponentMask;
  return is_nan ? internal::bit_cast<float>(internal::kFloat32AbsMask) : value;
}

template <>
PAGEDLORA_HOST_DEVICE inline Bfloat16 narrow<Bfloat16>(float value) {
  const std::uint32_t bits = internal::bit_cast<std::uint32_t>(value);
  if ((bits & internal::kFloat32AbsMask) > internal::kFloat32ExponentMask) {
    return Bfloat16{0x7FFFU};
  }
  const std::uint32_t rounding = 0x7FFFU + ((bits >> 16) & 1U);
  return Bfloat16{static_cast<std::uint16_t>((bits + rounding) >> 16)};
}

template <>
PAGEDLORA_HOST_DEVICE inline Float16 narrow<Float16>(float value) {
  const std::uint32_t bits = internal::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & internal::kFloat32AbsMask;
  if (magnitude > internal::kFloat32ExponentMask) {
    return Float16{0x7FFFU};
  }
  if (magnitude >= 0x477FF000U) {  // rounds to 2^16 or more
    return Float16{static_cast<std::uint16_t>(sign | 0x7C00U)};
  }
  if (magnitude >= 0x38800000U) {  // normal in float16
    const std::uint32_t rebiased = magnitude - (112U << 23);
    const std::uint32_t rounding = 0xFFFU + ((rebiased >> 13) & 1U);
    return Float16{static_cast<std::uint16_t>(sign | ((rebiased + rounding) >> 13))};
  }
  // Subnormal: adding 0.5 leaves the value's multiple of 2^-24 in the mantissa, rounded to even.
  const float shifted = internal::bit_cast<float>(magnitude) + 0.5F;
  const std::uint32_t mantissa = internal::bit_cast<std::uint32_t>(shifted) - 0x3F000000U;
  return Float16{static_cast<std::uint16_t>(sign | mantissa)};
}

// True when narrowing turned a finite value into an infinity. Only float16 can.
PAGEDLORA_HOST_DEVICE inline bool overflows_float16(float value) {
  const std::uint32_t magnitude =
      internal::bit_cast<std::uint32_t>(value) & internal::kFloat32AbsMask;
  return magnitude >= 0x477FF000U && magnitude < internal::kFloat32ExponentMask;
}

}  // namespace pagedlora
