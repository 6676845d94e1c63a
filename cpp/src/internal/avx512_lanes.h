// What the AVX-512 LoRA kernels share: elements of any Dtype as float32 lanes, sums across lanes,
// and the narrowing of dtype.h.
//
// Only for translation units compiled with AVX-512 flags. Everything is always inlined or has
// internal linkage and calls nothing of std or of our headers, so no function with AVX-512 code
// can stand in for one that other translation units share.
//
// Weights are handled 32 at a time as two float32 registers. bfloat16 widens cheaply into its
// even and its odd elements (a shift, a mask); the others into their first and last 16. Which of
// the two decides the order of the sums, so x follows the order of the weights.
#pragma once

// GCC 12 takes _mm512_undefined_ps() in its own headers for a mistake (GCC bug 105593). The
// warning is raised where the intrinsics are inlined, so it stays off to the end of the file.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "pagedlora/dtype.h"

namespace pagedlora::internal {
namespace {

#define PAGEDLORA_INLINE [[gnu::always_inline]] inline

struct Pair {
  __m512 first;
  __m512 second;
};

PAGEDLORA_INLINE __mmask32 low_bits32(std::uint32_t count) {
  return count >= 32 ? 0xFFFFFFFFU : (1U << count) - 1U;
}

PAGEDLORA_INLINE __mmask16 low_bits16(std::uint32_t count) {
  return static_cast<__mmask16>(low_bits32(count));
}

// --- 32 elements as float32. kMasked: those whose bit is clear are zero and not read.

template <bool kMasked>
PAGEDLORA_INLINE __m512i load_halves(const void* from, __mmask32 mask) {
  return kMasked ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_loadu_si512(from);
}

PAGEDLORA_INLINE Pair even_odd(__m512i bfloat16s) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bfloat16s, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bfloat16s, upper))};
}

PAGEDLORA_INLINE Pair even_odd(Pair halves) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(halves.first, even, halves.second),
          _mm512_permutex2var_ps(halves.first, odd, halves.second)};
}

PAGEDLORA_INLINE __m512 widen16(__m256i bfloat16s) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16s), 16));
}

PAGEDLORA_INLINE Pair halves_of_float16(__m512i v) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(v)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1))};
}

template <bool kMasked>
PAGEDLORA_INLINE Pair load_in_halves(const float* from, __mmask32 mask) {
  if constexpr (kMasked) {
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from),
            _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16)};
  } else {
    return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)};
  }
}

template <bool kMasked>
PAGEDLORA_INLINE Pair load_in_halves(const Float16* from, __mmask32 mask) {
  return halves_of_float16(load_halves<kMasked>(from, mask));
}

template <bool kMasked>
PAGEDLORA_INLINE Pair load_in_halves(const Bfloat16* from, __mmask32 mask) {
  const __m512i v = load_halves<kMasked>(from, mask);
  return {widen16(_mm512_castsi512_si256(v)), widen16(_mm512_extracti64x4_epi64(v, 1))};
}

template <bool kMasked>
PAGEDLORA_INLINE Pair load_even_odd(const Bfloat16* from, __mmask32 mask) {
  return even_odd(load_halves<kMasked>(from, mask));
}

template <bool kMasked, class T>
PAGEDLORA_INLINE Pair load_even_odd(const T* from, __mmask32 mask) {
  return even_odd(load_in_halves<kMasked>(from, mask));
}

template <class W>
constexpr bool kEvenOdd = false;
template <>
constexpr bool kEvenOdd<Bfloat16> = true;

template <class W, bool kMasked, class T>
PAGEDLORA_INLINE Pair load_as(const T* from, __mmask32 mask) {
  if constexpr (kEvenOdd<W>) {
    return load_even_odd<kMasked>(from, mask);
  } else {
    return load_in_halves<kMasked>(from, mask);
  }
}

// --- Sums across lanes, in a fixed order.

// 128-bit lane i of the result holds four partial sums of a_i.
PAGEDLORA_INLINE __m512 fold_to_lanes(const __m512* a) {
  const __m512 a01 =
      _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xDD));
  const __m512 a23 =
      _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x88), _mm512_shuffle_f32x4(a[2], a[3], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a01, a23, 0x88), _mm512_shuffle_f32x4(a01, a23, 0xDD));
}

// Element 4 k + lane of the result is the sum of the four floats in that 128-bit lane of p_k.
PAGEDLORA_INLINE __m512 sum_in_lanes(__m512 p0, __m512 p1, __m512 p2, __m512 p3) {
  const __m512 p01 = _mm512_add_ps(_mm512_unpacklo_ps(p0, p1), _mm512_unpackhi_ps(p0, p1));
  const __m512 p23 = _mm512_add_ps(_mm512_unpacklo_ps(p2, p3), _mm512_unpackhi_ps(p2, p3));
  const __m512 sums =
      _mm512_add_ps(_mm512_shuffle_ps(p01, p23, 0x44), _mm512_shuffle_ps(p01, p23, 0xEE));
  const __m512i transpose = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(transpose, sums);
}

// 128-bit lane i of q[k] is row 4 k + i of a 16 x 4 of 32-bit words; column c comes out in q[c].
PAGEDLORA_INLINE void transpose_quads(__m512 (&q)[4]) {
  const __m512i columns01 =
      _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i columns23 = _mm512_add_epi32(columns01, _mm512_set1_epi32(2));
  const __m512 low01 = _mm512_permutex2var_ps(q[0], columns01, q[1]);
  const __m512 low23 = _mm512_permutex2var_ps(q[0], columns23, q[1]);
  const __m512 high01 = _mm512_permutex2var_ps(q[2], columns01, q[3]);
  const __m512 high23 = _mm512_permutex2var_ps(q[2], columns23, q[3]);
  q[0] = _mm512_shuffle_f32x4(low01, high01, 0x44);
  q[1] = _mm512_shuffle_f32x4(low01, high01, 0xEE);
  q[2] = _mm512_shuffle_f32x4(low23, high23, 0x44);
  q[3] = _mm512_shuffle_f32x4(low23, high23, 0xEE);
}

// --- 16 elements of y.

PAGEDLORA_INLINE __mmask16 is_nan(__m512 v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }

PAGEDLORA_INLINE __m256i canonical_nan16() { return _mm256_set1_epi16(0x7FFF); }

template <bool kMasked>
PAGEDLORA_INLINE __m256i load_halves256(const void* from, __mmask16 mask) {
  return kMasked ? _mm256_maskz_loadu_epi16(mask, from)
                 : _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

template <bool kMasked>
PAGEDLORA_INLINE void store_halves256(void* to, __mmask16 mask, __m256i v) {
  if constexpr (kMasked) {
    _mm256_mask_storeu_epi16(to, mask, v);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(to), v);
  }
}

template <bool kMasked>
PAGEDLORA_INLINE __m512 load_y(const float* y, __mmask16 mask) {
  return kMasked ? _mm512_maskz_loadu_ps(mask, y) : _mm512_loadu_ps(y);
}

template <bool kMasked>
PAGEDLORA_INLINE __m512 load_y(const Float16* y, __mmask16 mask) {
  return _mm512_cvtph_ps(load_halves256<kMasked>(y, mask));
}

template <bool kMasked>
PAGEDLORA_INLINE __m512 load_y(const Bfloat16* y, __mmask16 mask) {
  return widen16(load_halves256<kMasked>(y, mask));
}

// Narrows to nearest, ties to even, with the canonical NaN.
template <bool kMasked>
PAGEDLORA_INLINE void store_y(float* y, __mmask16 mask, __m512 v) {
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF));
  const __m512 canonical = _mm512_mask_mov_ps(v, is_nan(v), nan);
  if constexpr (kMasked) {
    _mm512_mask_storeu_ps(y, mask, canonical);
  } else {
    _mm512_storeu_ps(y, canonical);
  }
}

template <bool kMasked>
PAGEDLORA_INLINE void store_y(Float16* y, __mmask16 mask, __m512 v) {
  const __m256i nearest = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  store_halves256<kMasked>(y, mask, _mm256_mask_mov_epi16(nearest, is_nan(v), canonical_nan16()));
}

template <bool kMasked>
PAGEDLORA_INLINE void store_y(Bfloat16* y, __mmask16 mask, __m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounding = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __m512i upper = _mm512_srli_epi32(_mm512_add_epi32(bits, rounding), 16);
  const __m256i nearest = _mm512_cvtepi32_epi16(upper);
  store_halves256<kMasked>(y, mask, _mm256_mask_mov_epi16(nearest, is_nan(v), canonical_nan16()));
}

}  // namespace
}  // namespace pagedlora::internal
