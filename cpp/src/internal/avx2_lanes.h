// What the AVX2 kernels share: elements of any Dtype as float32 lanes, transposition, and the
// narrowing of dtype.h.
//
// Only for translation units compiled with AVX2 flags. Everything is always inlined or has
// internal linkage and calls nothing of std or of our headers, so no function with AVX2 code can
// stand in for one that other translation units share.
//
// Kernels are written in terms of kWidth, Floats, Words and these functions wherever that costs
// nothing: the same functions for wider registers would make the same kernels.
//
// AVX2 cannot mask elements of two bytes, so what is shorter than a register goes through a
// buffer (load_part, store_part). Nothing outside of the elements asked for is read or written.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "pagedlora/dtype.h"

namespace pagedlora::internal {
namespace {

#define PAGEDLORA_INLINE [[gnu::always_inline]] inline

constexpr std::uint32_t kWidth = 8;  // float32 lanes of a register

using Floats = __m256;
using Words = __m256i;

PAGEDLORA_INLINE Floats zero() { return _mm256_setzero_ps(); }

PAGEDLORA_INLINE Floats broadcast(float value) { return _mm256_set1_ps(value); }

PAGEDLORA_INLINE Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }

PAGEDLORA_INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }

PAGEDLORA_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// --- kWidth elements as float32.

PAGEDLORA_INLINE Floats widen_bfloat16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

PAGEDLORA_INLINE __m128i load_halves(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

PAGEDLORA_INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }

PAGEDLORA_INLINE Floats load(const Float16* from) { return _mm256_cvtph_ps(load_halves(from)); }

PAGEDLORA_INLINE Floats load(const Bfloat16* from) { return widen_bfloat16(load_halves(from)); }

// The first `count` elements, fewer than kCount; the others become zero.
template <std::uint32_t kCount, class T>
PAGEDLORA_INLINE void copy_part(const T* from, std::size_t count, T* into) {
  __builtin_memset(into, 0, kCount * sizeof(T));
  __builtin_memcpy(into, from, count * sizeof(T));
}

template <class T>
PAGEDLORA_INLINE Floats load_part(const T* from, std::size_t count) {
  T part[kWidth];
  copy_part<kWidth>(from, count, part);
  return load(part);
}

// --- kWidth elements narrowed to nearest, ties to even, with the canonical NaN.

PAGEDLORA_INLINE Floats canonical(Floats v) {
  const Floats nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

PAGEDLORA_INLINE void store(float* to, Floats v) { _mm256_storeu_ps(to, canonical(v)); }

// The canonical NaN of float32 narrows to that of float16.
PAGEDLORA_INLINE __m128i narrow_float16(Floats v) {
  return _mm256_cvtps_ph(canonical(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// The results lie in the lower halves of the words, below zeros.
PAGEDLORA_INLINE Words narrow_bfloat16_words(Floats v) {
  const Words bits = _mm256_castps_si256(v);
  const Words odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Words rounding = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const Floats rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, rounding));
  const Floats nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const Floats result = _mm256_blendv_ps(rounded, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_castps_si256(result), 16);
}

PAGEDLORA_INLINE __m128i narrow_bfloat16(Floats v) {
  const Words words = narrow_bfloat16_words(v);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

PAGEDLORA_INLINE void store(Float16* to, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow_float16(v));
}

PAGEDLORA_INLINE void store(Bfloat16* to, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow_bfloat16(v));
}

template <class T>
PAGEDLORA_INLINE void store_part(T* to, std::size_t count, Floats v) {
  T part[kWidth];
  store(part, v);
  __builtin_memcpy(to, part, count * sizeof(T));
}

// --- 2 kWidth elements. bfloat16 widens cheaply into its even and its odd elements (a shift, a
// mask); the others into their first and last kWidth. Which of the two decides the order of sums,
// so what is multiplied with weights follows the order of the weights.

struct Pair {
  Floats first;
  Floats second;
};

template <class W>
constexpr bool kEvenOdd = false;
template <>
constexpr bool kEvenOdd<Bfloat16> = true;

PAGEDLORA_INLINE Pair even_odd(Words bfloat16s) {
  const Words upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bfloat16s, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(bfloat16s, upper))};
}

PAGEDLORA_INLINE Floats swap_middle_quarters(Floats v) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xD8));
}

PAGEDLORA_INLINE Pair even_odd(Pair halves) {
  return {swap_middle_quarters(_mm256_shuffle_ps(halves.first, halves.second, 0x88)),
          swap_middle_quarters(_mm256_shuffle_ps(halves.first, halves.second, 0xDD))};
}

PAGEDLORA_INLINE Pair load_even_odd(const Bfloat16* from) {
  return even_odd(_mm256_loadu_si256(reinterpret_cast<const Words*>(from)));
}

template <class T>
PAGEDLORA_INLINE Pair load_even_odd(const T* from) {
  return even_odd(Pair{load(from), load(from + kWidth)});
}

// In the order in which weights of type W are loaded.
template <class W, class T>
PAGEDLORA_INLINE Pair load_as(const T* from) {
  if constexpr (kEvenOdd<W>) {
    return load_even_odd(from);
  } else {
    return {load(from), load(from + kWidth)};
  }
}

// --- Sums across lanes, in a fixed order.

// Element i of each 128-bit lane of the result is the sum of that lane of p[i], added as
// (0 + 2) + (1 + 3).
PAGEDLORA_INLINE Floats sum_in_lanes(const Floats* p) {
  const Floats p01 = _mm256_add_ps(_mm256_unpacklo_ps(p[0], p[1]), _mm256_unpackhi_ps(p[0], p[1]));
  const Floats p23 = _mm256_add_ps(_mm256_unpacklo_ps(p[2], p[3]), _mm256_unpackhi_ps(p[2], p[3]));
  return _mm256_add_ps(_mm256_shuffle_ps(p01, p23, 0x44), _mm256_shuffle_ps(p01, p23, 0xEE));
}

// Element i is the sum of a[i].
PAGEDLORA_INLINE __m128 sum_lanes(const Floats* a) {
  const Floats sums = sum_in_lanes(a);
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// --- Columns of kWidth rows, `stride` elements apart.

constexpr std::uint32_t kLaneRows = 4;  // rows between those that share a register: 128-bit lanes

PAGEDLORA_INLINE Words join_lanes(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Transposes a 4 x 4 of 32-bit words in every 128-bit lane.
PAGEDLORA_INLINE void transpose_lanes(Floats (&v)[4]) {
  const Floats low01 = _mm256_unpacklo_ps(v[0], v[1]);
  const Floats high01 = _mm256_unpackhi_ps(v[0], v[1]);
  const Floats low23 = _mm256_unpacklo_ps(v[2], v[3]);
  const Floats high23 = _mm256_unpackhi_ps(v[2], v[3]);
  v[0] = _mm256_shuffle_ps(low01, low23, 0x44);
  v[1] = _mm256_shuffle_ps(low01, low23, 0xEE);
  v[2] = _mm256_shuffle_ps(high01, high23, 0x44);
  v[3] = _mm256_shuffle_ps(high01, high23, 0xEE);
}

// Four elements of each of two rows.
PAGEDLORA_INLINE Floats load_fours(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

PAGEDLORA_INLINE Floats load_fours(const Float16* low, const Float16* high) {
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low));
  const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
  return _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second));
}

// The first kColumns columns, 4 or 8: lane i of columns[c] is element c of rows[i].
template <int kColumns, class T>
PAGEDLORA_INLINE void load_columns(const T* const (&rows)[kWidth], Floats (&columns)[kColumns]) {
#pragma GCC unroll 2
  for (int half = 0; half < kColumns; half += 4) {
    Floats fours[4];
#pragma GCC unroll 4
    for (std::uint32_t i = 0; i < kLaneRows; ++i) {
      fours[i] = load_fours(rows[i] + half, rows[kLaneRows + i] + half);
    }
    transpose_lanes(fours);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      columns[half + i] = fours[i];
    }
  }
}

// Two elements of bfloat16 are moved as one word, and only then widened.
PAGEDLORA_INLINE void widen_columns(const Floats& words, Floats* columns) {
  const Pair pair = even_odd(_mm256_castps_si256(words));
  columns[0] = pair.first;
  columns[1] = pair.second;
}

PAGEDLORA_INLINE void load_columns(const Bfloat16* const (&rows)[kWidth], Floats (&columns)[8]) {
  Floats words[4];
#pragma GCC unroll 4
  for (std::uint32_t i = 0; i < kLaneRows; ++i) {
    words[i] =
        _mm256_castsi256_ps(join_lanes(load_halves(rows[i]), load_halves(rows[kLaneRows + i])));
  }
  transpose_lanes(words);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    widen_columns(words[i], columns + 2 * i);
  }
}

// Four elements of each of two rows, still bfloat16.
PAGEDLORA_INLINE __m128i load_four_halves(const Bfloat16* first, const Bfloat16* second) {
  return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
}

PAGEDLORA_INLINE void load_columns(const Bfloat16* const (&rows)[kWidth], Floats (&columns)[4]) {
  Floats words[2];
#pragma GCC unroll 2
  for (std::uint32_t i = 0; i < 2; ++i) {
    const Bfloat16* const* four = rows + i * 4;
    words[i] = _mm256_castsi256_ps(
        join_lanes(load_four_halves(four[0], four[1]), load_four_halves(four[2], four[3])));
  }
  const Pair pair = even_odd(Pair{words[0], words[1]});
  widen_columns(pair.first, columns);
  widen_columns(pair.second, columns + 2);
}

}  // namespace
}  // namespace pagedlora::internal
