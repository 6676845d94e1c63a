// Compiled with AVX2 flags: everything but attention_kernels_avx2 has internal linkage (see
// avx2_lanes.h).
#if defined(PAGEDLORA_HAVE_AVX2)

#include "internal/attention_kernels.h"
#include "internal/avx2_lanes.h"

namespace pagedlora::internal {
namespace {

constexpr int kVector = kWidth;                 // as the int in which this file counts
constexpr int kLaneVectors = kLanes / kVector;  // registers of a group of columns
constexpr int kMaxTileRows = 6;                 // with kLaneVectors registers of columns
constexpr int kWideTileRows = 3;                // up to these rows, with kWideTileVectors
constexpr int kWideTileVectors = 2 * kLaneVectors;

constexpr int min(int a, int b) { return a < b ? a : b; }

// --- rows of the cache

template <class Element>
void widen_rows(const void* const* rows, int num_rows, int dim, float* out,
                std::ptrdiff_t out_stride) {
  for (int i = 0; i < num_rows; ++i, out += out_stride) {
    const auto* row = static_cast<const Element*>(rows[i]);
    int d = 0;
    for (; d + kVector <= dim; d += kVector) {
      _mm256_storeu_ps(out + d, load(row + d));
    }
    if (d < dim) {
      _mm256_storeu_ps(out + d, load_part(row + d, static_cast<std::size_t>(dim - d)));
      d += kVector;
    }
    if (d % kLanes != 0) {
      _mm256_storeu_ps(out + d, zero());
    }
  }
}

template <class Element>
PAGEDLORA_INLINE void pack_columns(const Element* const (&rows)[kWidth], int num_columns,
                                   float* out) {
  Floats columns[8];
  load_columns(rows, columns);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if (i < num_columns) {
      _mm256_storeu_ps(out + i * kKeyTile, columns[i]);
    }
  }
}

// The last dims, fewer than 8, of kWidth keys.
template <class Element>
void pack_rest(const Element* const (&rows)[kWidth], int num_columns, float* out) {
  Element copies[kWidth][8];
  const Element* padded[kWidth];
  for (std::uint32_t i = 0; i < kWidth; ++i) {
    copy_part<8>(rows[i], static_cast<std::size_t>(num_columns), copies[i]);
    padded[i] = copies[i];
  }
  pack_columns(padded, num_columns, out);
}

template <class Element>
void pack_keys(const void* const* keys, int num_keys, int dim, float* out) {
  for (int i = 0; i < num_keys; i += kVector) {
    const Element* rows[kWidth];
    for (int k = 0; k < kVector; ++k) {
      rows[k] = static_cast<const Element*>(keys[i + k]);
    }
    int d = 0;
    for (; d + 8 <= dim; d += 8) {
      pack_columns(rows, 8, out + d * kKeyTile + i);
      for (const Element*& row : rows) {
        row += 8;
      }
    }
    if (d < dim) {
      pack_rest(rows, dim - d, out + d * kKeyTile + i);
    }
  }
}

// --- multiply

// total += a b for one k. The fewer of a's rows and b's registers stay in registers, the others
// pass through one: 16 are few.
template <int kRows, int kVectors>
PAGEDLORA_INLINE void multiply_step(const float* a, std::ptrdiff_t a_stride, const float* b,
                                    Floats (&total)[kRows][kVectors]) {
  if constexpr (kVectors < kRows) {
    Floats right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      right[j] = load(b + j * kVector);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats left = broadcast(a[i * a_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        total[i][j] = fused(left, right[j], total[i][j]);
      }
    }
  } else {
    Floats left[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      left[i] = broadcast(a[i * a_stride]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Floats right = load(b + j * kVector);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        total[i][j] = fused(left[i], right, total[i][j]);
      }
    }
  }
}

// kRows x kVectors registers of the product, from the given first row and column.
template <int kRows, int kVectors>
void multiply_tile(const RowProduct& product, int row, int column) {
  const std::ptrdiff_t a_stride = product.a_stride;
  const std::ptrdiff_t c_stride = product.c_stride;
  const float* a = product.a + row * a_stride;
  const float* b = product.b + column;
  float* c = product.c + row * c_stride + column;
  Floats total[kRows][kVectors] = {};
  if (product.row_scale != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats scale = broadcast(product.row_scale[row + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        total[i][j] = _mm256_mul_ps(load(c + i * c_stride + j * kVector), scale);
      }
    }
  }
  for (int k = 0; k < product.depth; ++k, b += product.b_stride) {
    multiply_step<kRows, kVectors>(a + k, a_stride, b, total);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      _mm256_storeu_ps(c + i * c_stride + j * kVector, total[i][j]);
    }
  }
}

using MultiplyTile = void (*)(const RowProduct&, int, int);

constexpr MultiplyTile kTiles[kMaxTileRows] = {
    multiply_tile<1, kLaneVectors>, multiply_tile<2, kLaneVectors>, multiply_tile<3, kLaneVectors>,
    multiply_tile<4, kLaneVectors>, multiply_tile<5, kLaneVectors>, multiply_tile<6, kLaneVectors>,
};
constexpr MultiplyTile kWideTiles[kWideTileRows] = {
    multiply_tile<1, kWideTileVectors>,
    multiply_tile<2, kWideTileVectors>,
    multiply_tile<3, kWideTileVectors>,
};

// The rows at hand take all columns before the next ones: a is read once. Few rows take more
// columns at a time, so that enough sums are under way.
void multiply(const RowProduct& product) {
  constexpr int kWideColumns = kWideTileVectors * kVector;
  for (int row = 0; row < product.rows; row += kMaxTileRows) {
    const int num_rows = min(product.rows - row, kMaxTileRows);
    int column = 0;
    if (num_rows <= kWideTileRows) {
      for (; column + kWideColumns <= product.columns; column += kWideColumns) {
        kWideTiles[num_rows - 1](product, row, column);
      }
    }
    for (; column < product.columns; column += kLanes) {
      kTiles[num_rows - 1](product, row, column);
    }
  }
}

// --- softmax

// Within 2 ulp, subnormal results included; exact at 0; exp(-infinity) = 0; NaN passes through.
// Cody-Waite reduction and the polynomial of Cephes' expf. For arguments below 88 only.
PAGEDLORA_INLINE Floats exponential(Floats x) {
  x = _mm256_max_ps(broadcast(-104.0F), x);  // the second operand is kept if NaN
  const Floats n = _mm256_round_ps(_mm256_mul_ps(x, broadcast(1.44269504088896341F)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = _mm256_fnmadd_ps(n, broadcast(0.693359375F), x);
  r = _mm256_fnmadd_ps(n, broadcast(-2.12194440e-4F), r);
  Floats p = broadcast(1.9875691500e-4F);
  p = fused(p, r, broadcast(1.3981999507e-3F));
  p = fused(p, r, broadcast(8.3334519073e-3F));
  p = fused(p, r, broadcast(4.1665795894e-2F));
  p = fused(p, r, broadcast(1.6666665459e-1F));
  p = fused(p, r, broadcast(5.0000001201e-1F));
  p = _mm256_add_ps(fused(p, _mm256_mul_ps(r, r), r), broadcast(1.0F));
  // Times 2^n in two steps, because 2^n itself can be too small for a normal float. Only the
  // second can round, and only to a subnormal.
  const Words exponent = _mm256_cvtps_epi32(n);
  const Words half = _mm256_srai_epi32(exponent, 1);
  const Words bias = _mm256_set1_epi32(127);
  const Words first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const Words second =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(first));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(second));
}

// tanh, by Cephes' polynomial near 0 (where 1 - 2 / (e^2x + 1) cancels) and by exp elsewhere.
PAGEDLORA_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats z = _mm256_mul_ps(x, x);
  Floats p = broadcast(-5.70498872745e-3F);
  p = fused(p, z, broadcast(2.06390887954e-2F));
  p = fused(p, z, broadcast(-5.37397155531e-2F));
  p = fused(p, z, broadcast(1.33314422036e-1F));
  p = fused(p, z, broadcast(-3.33332819422e-1F));
  const Floats near_zero = fused(_mm256_mul_ps(p, z), x, x);
  const Floats sign = broadcast(-0.0F);
  const Floats magnitude = _mm256_andnot_ps(sign, x);
  const Floats decay = exponential(_mm256_mul_ps(magnitude, broadcast(-2.0F)));
  const Floats one = broadcast(1.0F);
  const Floats positive = _mm256_div_ps(_mm256_sub_ps(one, decay), _mm256_add_ps(one, decay));
  const Floats small = _mm256_cmp_ps(magnitude, broadcast(0.625F), _CMP_LT_OQ);
  return _mm256_blendv_ps(_mm256_or_ps(positive, _mm256_and_ps(x, sign)), near_zero, small);
}

// All bits set in the lanes of the visible keys.
PAGEDLORA_INLINE Floats visible_lanes(const SoftmaxStep& step, int column) {
  const Words key =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(column));
  const Words not_before = _mm256_cmpgt_epi32(key, _mm256_set1_epi32(step.first_key - 1));
  const Words before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(step.end_key), key);
  return _mm256_castsi256_ps(_mm256_and_si256(not_before, before_end));
}

PAGEDLORA_INLINE Floats final_scores(const SoftmaxStep& step, const float* scores) {
  const Floats scaled = _mm256_mul_ps(load(scores), broadcast(step.scaling));
  if (step.softcap == 0.0F) {
    return scaled;
  }
  const Floats cap = broadcast(step.softcap);
  return _mm256_mul_ps(cap, hyperbolic_tangent(_mm256_div_ps(scaled, cap)));
}

PAGEDLORA_INLINE float highest_lane(Floats v) {
  __m128 highest = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  highest = _mm_max_ps(highest, _mm_movehl_ps(highest, highest));
  return _mm_cvtss_f32(_mm_max_ss(highest, _mm_movehdup_ps(highest)));
}

void softmax_row(const SoftmaxStep& step, float* scores, float& maximum, float* sums,
                 float& rescale) {
  const Floats minus_infinity = broadcast(-__builtin_inff());
  const int first_column = step.first_key / kLanes * kLanes;
  Floats logits[kKeyTile / kVector];
  Floats highest = broadcast(maximum);
  for (int column = first_column; column < step.end_key; column += kVector) {
    Floats& logit = logits[(column - first_column) / kVector];
    logit = _mm256_blendv_ps(minus_infinity, final_scores(step, scores + column),
                             visible_lanes(step, column));
    highest = _mm256_max_ps(logit, highest);  // the second operand is kept if NaN
  }
  const float new_maximum = highest_lane(highest);
  // While every score is -infinity there is no maximum to subtract: the weights are zero.
  const float reference = new_maximum == -__builtin_inff() ? 0.0F : new_maximum;
  const Floats factor = exponential(broadcast(maximum - reference));
  maximum = new_maximum;
  rescale = _mm256_cvtss_f32(factor);
  Floats sum[kLaneVectors];
  for (int i = 0; i < kLaneVectors; ++i) {
    sum[i] = _mm256_mul_ps(load(sums + i * kVector), factor);
  }
  for (int column = first_column; column < step.end_key; column += kVector) {
    const Floats logit = logits[(column - first_column) / kVector];
    const Floats weight = exponential(_mm256_sub_ps(logit, broadcast(reference)));
    _mm256_storeu_ps(scores + column, weight);
    Floats& lanes = sum[column % kLanes / kVector];
    lanes = _mm256_add_ps(lanes, weight);
  }
  for (int i = 0; i < kLaneVectors; ++i) {
    _mm256_storeu_ps(sums + i * kVector, sum[i]);
  }
}

void softmax(const SoftmaxStep& step) {
  for (int i = 0; i < step.rows; ++i) {
    softmax_row(step, step.scores + i * kKeyTile, step.maximum[i], step.sums + i * kLanes,
                step.rescale[i]);
  }
}

// --- output

PAGEDLORA_INLINE float sum_of_lanes(const float* sums) {
  const Floats eight = _mm256_add_ps(load(sums), load(sums + kVector));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

template <class Element>
void store_row(const float* values, const float* sums, int dim, void* out) {
  const Floats total = broadcast(sum_of_lanes(sums));
  auto* elements = static_cast<Element*>(out);
  int d = 0;
  for (; d + kVector <= dim; d += kVector) {
    store(elements + d, _mm256_div_ps(load(values + d), total));
  }
  if (d < dim) {
    store_part(elements + d, static_cast<std::size_t>(dim - d),
               _mm256_div_ps(load(values + d), total));
  }
}

template <class Element>
constexpr AttentionKernels kTable = {widen_rows<Element>, pack_keys<Element>, multiply, softmax,
                                     store_row<Element>};

}  // namespace

const AttentionKernels& attention_kernels_avx2(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
      return kTable<Float16>;
    case Dtype::bfloat16:
      return kTable<Bfloat16>;
    case Dtype::float32:
      break;
  }
  return kTable<float>;
}

}  // namespace pagedlora::internal

#endif  // defined(PAGEDLORA_HAVE_AVX2)
