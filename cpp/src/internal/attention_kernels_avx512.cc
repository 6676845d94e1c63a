// Compiled with AVX-512 flags. Nothing here may emit code under a name another file could share: no
// std templates and no inline functions of our headers, or the linker may choose the AVX-512
// copy for every caller. Hence own conversions, in the anonymous namespace.
#if defined(PAGEDLORA_HAVE_AVX512)

#include <immintrin.h>

#include "internal/attention_kernels.h"

namespace pagedlora::internal {
namespace {

constexpr int kMaxTileRows = 6;     // 6 x 4 accumulators, 4 columns and a broadcast: 29 registers
constexpr int kMaxTileVectors = 4;  // of kLanes columns

inline __mmask16 nan_lanes(__m512 value) { return _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q); }

inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>((1U << static_cast<unsigned>(count)) - 1U);
}

// How each dtype is read, written (rounded and NaN made canonical as by narrow() of dtype.h) and,
// with unpack, split out of 32-bit words into one vector per element.
struct Float32Type {
  static constexpr int kBytes = 4;
  static __m512 load(const void* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
  static void store(void* to, __mmask16 lanes, __m512 value) {
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF));
    _mm512_mask_storeu_ps(to, lanes, _mm512_mask_mov_ps(value, nan_lanes(value), nan));
  }
  static void unpack(__m512i word, __m512* out) { out[0] = _mm512_castsi512_ps(word); }
};

struct Bfloat16Type {
  static constexpr int kBytes = 2;
  static __m512 load(const void* from, __mmask16 lanes) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static void store(void* to, __mmask16 lanes, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounding = _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7FFF));
    const __m512i narrowed = _mm512_srli_epi32(_mm512_add_epi32(bits, rounding), 16);
    const __m512i canonical =
        _mm512_mask_mov_epi32(narrowed, nan_lanes(value), _mm512_set1_epi32(0x7FFF));
    _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(canonical));
  }
  static void unpack(__m512i word, __m512* out) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(word, 16));
    out[1] = _mm512_castsi512_ps(
        _mm512_and_si512(word, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
  }
};

struct Float16Type {
  static constexpr int kBytes = 2;
  static __m512 load(const void* from, __mmask16 lanes) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from));
  }
  static void store(void* to, __mmask16 lanes, __m512 value) {
    const __m256i narrowed = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i nan = _mm256_set1_epi16(0x7FFF);
    _mm256_mask_storeu_epi16(to, lanes, _mm256_mask_mov_epi16(narrowed, nan_lanes(value), nan));
  }
  static void unpack(__m512i word, __m512* out) {
    out[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word));
    out[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word, 16)));
  }
};

template <class Type>
void widen_rows(const void* const* rows, int num_rows, int dim, float* out,
                std::ptrdiff_t out_stride) {
  const __mmask16 tail = first_lanes(dim % kLanes);
  for (int i = 0; i < num_rows; ++i, out += out_stride) {
    const char* row = static_cast<const char*>(rows[i]);
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      _mm512_storeu_ps(out + d, Type::load(row + d * Type::kBytes, 0xFFFF));
    }
    if (d < dim) {
      _mm512_storeu_ps(out + d, Type::load(row + d * Type::kBytes, tail));
    }
  }
}

// The 16 bytes at `offset` of rows `first`, first + 4, first + 8, first + 12, one per 128-bit lane.
inline __m512i load_lanes(const void* const* rows, int first, std::ptrdiff_t offset,
                          __mmask16 bytes) {
  const auto load = [&](int row) {
    return _mm_maskz_loadu_epi8(bytes, static_cast<const char*>(rows[row]) + offset);
  };
  __m512i lanes = _mm512_castsi128_si512(load(first));
  lanes = _mm512_inserti32x4(lanes, load(first + 4), 1);
  lanes = _mm512_inserti32x4(lanes, load(first + 8), 2);
  return _mm512_inserti32x4(lanes, load(first + 12), 3);
}

// Transposes a 4 x 4 of 32-bit words in every 128-bit lane.
inline void transpose_lanes(__m512i* words) {
  const __m512i low01 = _mm512_unpacklo_epi32(words[0], words[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(words[0], words[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(words[2], words[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(words[2], words[3]);
  words[0] = _mm512_unpacklo_epi64(low01, low23);
  words[1] = _mm512_unpackhi_epi64(low01, low23);
  words[2] = _mm512_unpacklo_epi64(high01, high23);
  words[3] = _mm512_unpackhi_epi64(high01, high23);
}

// Packs the `num_dims` dims (16 bytes' worth or less) from dim `first` of kLanes keys.
template <class Type>
inline void pack_chunk(const void* const* rows, int first, int num_dims, __mmask16 bytes,
                       float* out) {
  constexpr int kPerWord = 4 / Type::kBytes;
  __m512i words[4];
  for (int i = 0; i < 4; ++i) {
    words[i] = load_lanes(rows, i, static_cast<std::ptrdiff_t>(first) * Type::kBytes, bytes);
  }
  transpose_lanes(words);
  __m512 columns[4 * kPerWord];
  for (int i = 0; i < 4; ++i) {
    Type::unpack(words[i], columns + i * kPerWord);
  }
  for (int i = 0; i < num_dims; ++i) {
    _mm512_storeu_ps(out + (first + i) * kKeyTile, columns[i]);
  }
}

template <class Type>
void pack_keys(const void* const* rows, int num_keys, int dim, float* out) {
  constexpr int kChunk = 16 / Type::kBytes;
  const int tail = dim % kChunk;
  const __mmask16 tail_bytes = first_lanes(tail * Type::kBytes);
  for (int i = 0; i < num_keys; i += kLanes) {
    int d = 0;
    for (; d + kChunk <= dim; d += kChunk) {
      pack_chunk<Type>(rows + i, d, kChunk, 0xFFFF, out + i);
    }
    if (tail != 0) {
      pack_chunk<Type>(rows + i, d, tail, tail_bytes, out + i);
    }
  }
}

// Rows x Vectors * kLanes of the product, from the given first row and column.
template <int Rows, int Vectors>
void multiply_tile(const RowProduct& product, int row, int column) {
  const std::ptrdiff_t a_stride = product.a_stride;
  const std::ptrdiff_t c_stride = product.c_stride;
  const float* a = product.a + row * a_stride;
  const float* b = product.b + column;
  float* c = product.c + row * c_stride + column;
  __m512 total[Rows][Vectors] = {};
  if (product.row_scale != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const __m512 scale = _mm512_set1_ps(product.row_scale[row + i]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) {
        total[i][j] = _mm512_mul_ps(_mm512_loadu_ps(c + i * c_stride + j * kLanes), scale);
      }
    }
  }
  for (int k = 0; k < product.depth; ++k, b += product.b_stride) {
    __m512 right[Vectors];
    for (int j = 0; j < Vectors; ++j) {
      right[j] = _mm512_loadu_ps(b + j * kLanes);
    }
    for (int i = 0; i < Rows; ++i) {
      const __m512 left = _mm512_set1_ps(a[i * a_stride + k]);
      for (int j = 0; j < Vectors; ++j) {
        total[i][j] = _mm512_fmadd_ps(left, right[j], total[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      _mm512_storeu_ps(c + i * c_stride + j * kLanes, total[i][j]);
    }
  }
}

using MultiplyTile = void (*)(const RowProduct&, int, int);

#define PAGEDLORA_TILE_ROW(rows) \
  {multiply_tile<rows, 1>, multiply_tile<rows, 2>, multiply_tile<rows, 3>, multiply_tile<rows, 4>}
constexpr MultiplyTile kMultiplyTiles[kMaxTileRows][kMaxTileVectors] = {
    PAGEDLORA_TILE_ROW(1), PAGEDLORA_TILE_ROW(2), PAGEDLORA_TILE_ROW(3),
    PAGEDLORA_TILE_ROW(4), PAGEDLORA_TILE_ROW(5), PAGEDLORA_TILE_ROW(6),
};
#undef PAGEDLORA_TILE_ROW

constexpr int min(int a, int b) { return a < b ? a : b; }

void multiply(const RowProduct& product) {
  const int vectors = product.columns / kLanes;
  for (int vector = 0; vector < vectors; vector += kMaxTileVectors) {
    const int num_vectors = min(vectors - vector, kMaxTileVectors);
    for (int row = 0; row < product.rows; row += kMaxTileRows) {
      const int num_rows = min(product.rows - row, kMaxTileRows);
      kMultiplyTiles[num_rows - 1][num_vectors - 1](product, row, vector * kLanes);
    }
  }
}

// Within 2 ulp, subnormal results included; exact at 0; exp(-infinity) = 0; NaN passes through.
// Cody-Waite reduction and the polynomial of Cephes' expf. For arguments below 88 only.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0F), x);  // the second operand is kept if NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341F)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4F);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1F));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
  return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0F)), n);
}

// tanh, by Cephes' polynomial near 0 (where 1 - 2 / (e^2x + 1) cancels) and by exp elsewhere.
inline __m512 hyperbolic_tangent(__m512 x) {
  const __m512 z = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-5.70498872745e-3F);
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2F));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2F));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1F));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1F));
  const __m512 near_zero = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
  const __m512 magnitude = _mm512_abs_ps(x);
  const __m512 decay = exponential(_mm512_mul_ps(magnitude, _mm512_set1_ps(-2.0F)));
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 positive = _mm512_div_ps(_mm512_sub_ps(one, decay), _mm512_add_ps(one, decay));
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0F));
  const __mmask16 small = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0.625F), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_or_ps(positive, sign), small, near_zero);
}

inline __mmask16 visible_lanes(const SoftmaxStep& step, int column) {
  const int end = min(step.end_key - column, kLanes);
  const int first = step.first_key - column;
  const unsigned hidden = first > 0 ? (1U << static_cast<unsigned>(first)) - 1U : 0U;
  return static_cast<__mmask16>(((1U << static_cast<unsigned>(end)) - 1U) & ~hidden);
}

inline __m512 final_scores(const SoftmaxStep& step, const float* scores) {
  const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores), _mm512_set1_ps(step.scaling));
  if (step.softcap == 0.0F) {
    return scaled;
  }
  const __m512 cap = _mm512_set1_ps(step.softcap);
  return _mm512_mul_ps(cap, hyperbolic_tangent(_mm512_div_ps(scaled, cap)));
}

void softmax_row(const SoftmaxStep& step, float* scores, float& maximum, float* sums,
                 float& rescale) {
  const __m512 minus_infinity = _mm512_set1_ps(-__builtin_inff());
  const int first_column = step.first_key / kLanes * kLanes;
  __m512 logits[kKeyTile / kLanes];
  __m512 highest = _mm512_set1_ps(maximum);
  for (int column = first_column; column < step.end_key; column += kLanes) {
    __m512& logit = logits[(column - first_column) / kLanes];
    logit = _mm512_mask_mov_ps(minus_infinity, visible_lanes(step, column),
                               final_scores(step, scores + column));
    highest = _mm512_max_ps(logit, highest);  // the second operand is kept if NaN
  }
  const float new_maximum = _mm512_reduce_max_ps(highest);
  // While every score is -infinity there is no maximum to subtract: the weights are zero.
  const float reference = new_maximum == -__builtin_inff() ? 0.0F : new_maximum;
  const __m512 factor = exponential(_mm512_set1_ps(maximum - reference));
  maximum = new_maximum;
  rescale = _mm512_cvtss_f32(factor);
  __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(sums), factor);
  for (int column = first_column; column < step.end_key; column += kLanes) {
    const __m512 logit = logits[(column - first_column) / kLanes];
    const __m512 weight = exponential(_mm512_sub_ps(logit, _mm512_set1_ps(reference)));
    _mm512_storeu_ps(scores + column, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  _mm512_storeu_ps(sums, sum);
}

void softmax(const SoftmaxStep& step) {
  for (int i = 0; i < step.rows; ++i) {
    softmax_row(step, step.scores + i * kKeyTile, step.maximum[i], step.sums + i * kLanes,
                step.rescale[i]);
  }
}

template <class Type>
void store_row(const float* values, const float* sums, int dim, void* out) {
  const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_loadu_ps(sums)));
  for (int d = 0; d < dim; d += kLanes) {
    const __mmask16 lanes = first_lanes(min(dim - d, kLanes));
    Type::store(static_cast<char*>(out) + d * Type::kBytes, lanes,
                _mm512_div_ps(_mm512_loadu_ps(values + d), total));
  }
}

template <class Type>
constexpr AttentionKernels kTable = {widen_rows<Type>, pack_keys<Type>, multiply, softmax,
                                     store_row<Type>};

}  // namespace

const AttentionKernels& attention_kernels_avx512(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
      return kTable<Float16Type>;
    case Dtype::bfloat16:
      return kTable<Bfloat16Type>;
    case Dtype::float32:
      break;
  }
  return kTable<Float32Type>;
}

}  // namespace pagedlora::internal

#endif  // defined(PAGEDLORA_HAVE_AVX512)
