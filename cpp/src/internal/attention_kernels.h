// The inner loops of PagedAttention, as a table of functions for one instruction set and dtype.
//
// The driver (paged_attention.cc) cuts the keys of a sequence into tiles of kKeyTile positions,
// aligned to absolute positions, and the queries into rows. Every function treats a row on its own:
// what it computes for one row depends on that row's arguments alone, never on how many rows there
// are. That is what makes results independent of chunking and of neighbours.
//
// Pure functions over the caller's memory; thread-safe. This header is included by files compiled
// for newer processors: declarations and plain data only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"

namespace pagedlora::internal {

inline constexpr int kLanes = 16;    // columns are handled in groups of this many floats
inline constexpr int kKeyTile = 64;  // keys per tile
inline constexpr float kMinusInfinity = -__builtin_inff();

// c = row_scale * c + a b, summed over `depth` in ascending order. row_scale null: c = a b.
struct RowProduct {
  const float* a;  // [rows, depth]
  std::ptrdiff_t a_stride;
  const float* b;  // [depth, columns]
  std::ptrdiff_t b_stride;
  float* c;  // [rows, columns]
  std::ptrdiff_t c_stride;
  const float* row_scale;  // [rows] or null
  int rows;
  int depth;
  int columns;  // a multiple of kLanes
};

// One tile's step of the online softmax. Keys [first_key, end_key) of the tile are visible to all
// rows.
struct SoftmaxStep {
  float* scores;   // [rows, kKeyTile]; in: q . k; out: exp(score - new maximum), visible keys only
  float* maximum;  // [rows], running
  float* sums;     // [rows, kLanes], running; lane = position modulo kLanes
  float* rescale;  // [rows], out: exp(old maximum - new maximum)
  int rows;
  int first_key;
  int end_key;
  float scaling;
  float softcap;  // 0: none
};

struct AttentionKernels {
  // out[i, 0..dim) = rows[i], widened; up to the next multiple of kLanes it is filled with zeros.
  void (*widen_rows)(const void* const* rows, int num_rows, int dim, float* out,
                     std::ptrdiff_t out_stride);

  // Transposes num_keys (a multiple of kLanes) rows: out[d * kKeyTile + i] = rows[i][d].
  void (*pack_keys)(const void* const* rows, int num_keys, int dim, float* out);

  void (*multiply)(const RowProduct& product);

  void (*softmax)(const SoftmaxStep& step);

  // out[d] = narrow(values[d] / sum of the kLanes sums). `values` is readable up to a multiple of
  // kLanes.
  void (*store_row)(const float* values, const float* sums, int dim, void* out);
};

// The portable table where this build has no other.
const AttentionKernels& attention_kernels(Isa isa, Dtype dtype);

const AttentionKernels& attention_kernels_portable(Dtype dtype);
const AttentionKernels& attention_kernels_avx2(Dtype dtype);    // only with PAGEDLORA_HAVE_AVX2
const AttentionKernels& attention_kernels_avx512(Dtype dtype);  // only with PAGEDLORA_HAVE_AVX512

}  // namespace pagedlora::internal
