// The inner loops of LoraOperator, one table of function pointers per (activations, weights, Isa).
//
// A tile is at most kTileRows rows of one task. All variants share one contract: the result of a
// row depends on its own x, on the weights and on the lengths of the parts, never on num_rows or
// on where a part begins. Variants differ from each other by rounding only. Sums are float32.
//
// Tables are immutable; kernels touch only what their arguments name; thread-safe. No pointer
// needs more alignment than its elements have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"

namespace pagedlora::internal {

inline constexpr std::uint32_t kTileRows = 16;
inline constexpr std::uint32_t kRankLanes = 8;           // floats of rank space per row and block
inline constexpr std::uint32_t kMaxExpandLength = 2048;  // a multiple of every register's floats
inline constexpr std::size_t kNumDtypes = 3;

// Some features of a block's A [rank_count, length] or B [length, rank_count], in one piece.
struct WeightsPart {
  const void* at = nullptr;  // weights dtype
  std::size_t bytes = 0;
  std::uint32_t begin = 0;  // the first of its input (A) or output (B) features
  std::uint32_t length = 0;
  std::uint32_t rank_count = 0;  // at most kRankLanes
};

// Weights in the order in which they will be read: a hint. Kernels ask for as much of them as they
// read themselves, so the distance stays.
struct ReadAhead {
  const WeightsPart* part = nullptr;
  const WeightsPart* end = nullptr;
  std::size_t offset = 0;  // in bytes of *part
};

// t[row, r] += sum over i of a[r, i] * x[row, i], for r < rank_count.
struct ShrinkArgs {
  const void* x = nullptr;        // [num_rows, in_features], activations dtype
  std::int64_t x_row_stride = 0;  // in elements
  std::uint32_t num_rows = 0;
  const WeightsPart* parts = nullptr;  // all parts of one block's A, at least one
  std::uint32_t num_parts = 0;
  float* t = nullptr;          // [num_rows, kRankLanes]; lanes from rank_count on stay as they are
  ReadAhead* ahead = nullptr;  // required
};

// y[row, o] = narrow(widen(y[row, o]) + sum over blocks and r of b[o, r] * t[block, row, r]).
struct ExpandArgs {
  const float* t = nullptr;  // [num_blocks, num_rows, kRankLanes], zero from rank_count on
  std::uint32_t num_rows = 0;
  const WeightsPart* blocks = nullptr;  // a part of B of every block, with the same features
  std::uint32_t num_blocks = 0;
  std::uint32_t length = 0;  // at most kMaxExpandLength
  void* y = nullptr;         // [num_rows, length], activations dtype
  std::int64_t y_row_stride = 0;
  ReadAhead* ahead = nullptr;  // required
};

struct LoraKernels {
  void (*shrink)(const ShrinkArgs&) = nullptr;
  void (*expand)(const ExpandArgs&) = nullptr;
};

// Requires isa <= best_isa().
const LoraKernels& lora_kernels(Dtype activations, Dtype weights, Isa isa);

// Entry [activations][weights]; only where PAGEDLORA_HAVE_AVX2 or PAGEDLORA_HAVE_AVX512 is defined.
extern const LoraKernels kAvx2LoraKernels[kNumDtypes][kNumDtypes];
extern const LoraKernels kAvx512LoraKernels[kNumDtypes][kNumDtypes];

}  // namespace pagedlora::internal
