// The AVX-512 shrink of LoraKernels; all of avx512_lanes.h applies.
//
// Every sum is added step by step through all parts, whatever the number of rows.
#pragma once

#include "avx512_lanes.h"
#include "lora_kernels.h"
#include "read_ahead.h"

namespace pagedlora::internal {
namespace {

constexpr std::uint32_t kStep = 32;  // input features of a step
constexpr std::uint32_t kSteps = 8;  // steps of A that are widened at a time for a tile of rows
constexpr std::uint32_t kChunk = kStep * kSteps;

template <int kRanks>
struct WideStep {
  Pair ranks[kRanks];
};

// What comes of a row: partial sums of its ranks.
template <int kRanks>
struct RowSums {
  __m512 ranks[kRanks];
};

// Ranks from rank_count up to kRanks repeat the last one; their sums are dropped.
template <class W, int kRanks>
PAGEDLORA_INLINE void find_ranks(const WeightsPart& part, const W* (&a)[kRanks]) {
#pragma GCC unroll 8
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::size_t from = rank < part.rank_count ? rank : part.rank_count - 1;
    a[rank] = static_cast<const W*>(part.at) + from * part.length;
  }
}

template <class W, bool kMasked, int kRanks>
PAGEDLORA_INLINE void widen_step(const W* const (&a)[kRanks], std::size_t i, __mmask32 mask,
                                 WideStep<kRanks>& wide) {
#pragma GCC unroll 8
  for (int rank = 0; rank < kRanks; ++rank) {
    wide.ranks[rank] = load_as<W, kMasked>(a[rank] + i, mask);
  }
}

template <class X, class W, bool kMasked, int kRows, int kRanks>
PAGEDLORA_INLINE void shrink_step(const X* const (&x)[kRows], std::size_t i, __mmask32 mask,
                                  const WideStep<kRanks>& wide, RowSums<kRanks> (&sums)[kRows]) {
  Pair inputs[kRows];
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row) {
    inputs[row] = load_as<W, kMasked>(x[row] + i, mask);
  }
#pragma GCC unroll 8
  for (int rank = 0; rank < kRanks; ++rank) {
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      __m512& sum = sums[row].ranks[rank];
      sum = _mm512_fmadd_ps(wide.ranks[rank].first, inputs[row].first, sum);
      sum = _mm512_fmadd_ps(wide.ranks[rank].second, inputs[row].second, sum);
    }
  }
}

template <int kRanks>
PAGEDLORA_INLINE void clear(RowSums<kRanks>& sums) {
#pragma GCC unroll 8
  for (__m512& sum : sums.ranks) {
    sum = _mm512_setzero_ps();
  }
}

template <int kRanks>
PAGEDLORA_INLINE void add_sums(const RowSums<kRanks>& sums, std::uint32_t rank_count, float* t) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 low = fold_to_lanes(sums.ranks);
  const __m512 high = kRanks == 8 ? fold_to_lanes(sums.ranks + (kRanks - 4)) : zero;
  const __mmask16 ranks = low_bits16(rank_count);
  const __m512 all = sum_in_lanes(low, high, zero, zero);
  _mm512_mask_storeu_ps(t, ranks, _mm512_add_ps(_mm512_maskz_loadu_ps(ranks, t), all));
}

template <class X, class W, int kRanks>
void shrink_row(const ShrinkArgs& args) {
  RowSums<kRanks> sums[1];
  clear(sums[0]);
  for (std::uint32_t p = 0; p < args.num_parts; ++p) {
    const WeightsPart& part = args.parts[p];
    const X* const x[1] = {static_cast<const X*>(args.x) + part.begin};
    const W* a[kRanks];
    find_ranks(part, a);
    WideStep<kRanks> wide;
    const std::size_t step_bytes = kStep * sizeof(W) * part.rank_count;
    std::uint32_t i = 0;
    for (; i + kStep <= part.length; i += kStep) {
      read_ahead(*args.ahead, step_bytes);
      widen_step<W, false>(a, i, 0, wide);
      shrink_step<X, W, false>(x, i, 0, wide, sums);
    }
    if (i < part.length) {
      const __mmask32 rest = low_bits32(part.length - i);
      read_ahead(*args.ahead, step_bytes);
      widen_step<W, true>(a, i, rest, wide);
      shrink_step<X, W, true>(x, i, rest, wide, sums);
    }
  }
  add_sums(sums[0], args.parts->rank_count, args.t);
}

// Input features [first, first + length) of a part, at most kChunk.
template <class X, class W, int kRows, int kRanks>
PAGEDLORA_INLINE void shrink_chunk(const X* x, std::int64_t x_row_stride, std::uint32_t length,
                                   const WideStep<kRanks>* wide, RowSums<kRanks>* into) {
  const X* rows[kRows];
  RowSums<kRanks> sums[kRows];
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row) {
    rows[row] = x + row * x_row_stride;
    sums[row] = into[row];
  }
  std::uint32_t i = 0;
  for (; i + kStep <= length; i += kStep, ++wide) {
    shrink_step<X, W, false>(rows, i, 0, *wide, sums);
  }
  if (i < length) {
    shrink_step<X, W, true>(rows, i, low_bits32(length - i), *wide, sums);
  }
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row) {
    into[row] = sums[row];
  }
}

template <class W, int kRanks>
PAGEDLORA_INLINE void widen_chunk(const W* const (&a)[kRanks], std::uint32_t first,
                                  std::uint32_t length, WideStep<kRanks>* wide) {
  std::uint32_t i = 0;
  for (; i + kStep <= length; i += kStep, ++wide) {
    widen_step<W, false>(a, first + i, 0, *wide);
  }
  if (i < length) {
    widen_step<W, true>(a, first + i, low_bits32(length - i), *wide);
  }
}

// Widens each weight once for all rows. Asks for B as well: it is read by fewer instructions.
template <class X, class W, int kRanks>
void shrink_tile(const ShrinkArgs& args) {
  WideStep<kRanks> wide[kSteps];
  RowSums<kRanks> sums[kTileRows];
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    clear(sums[row]);
  }
  for (std::uint32_t p = 0; p < args.num_parts; ++p) {
    const WeightsPart& part = args.parts[p];
    const W* a[kRanks];
    find_ranks(part, a);
    for (std::uint32_t first = 0; first < part.length; first += kChunk) {
      const std::uint32_t left = part.length - first;
      const std::uint32_t length = left < kChunk ? left : kChunk;
      widen_chunk<W>(a, first, length, wide);
      const X* x = static_cast<const X*>(args.x) + part.begin + first;
      std::uint32_t row = 0;
      for (; row + 2 <= args.num_rows; row += 2) {
        read_ahead(*args.ahead, 2 * kStep * sizeof(W) * part.rank_count);
        shrink_chunk<X, W, 2>(x + row * args.x_row_stride, args.x_row_stride, length, wide,
                              sums + row);
      }
      if (row < args.num_rows) {
        shrink_chunk<X, W, 1>(x + row * args.x_row_stride, 0, length, wide, sums + row);
      }
    }
  }
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    add_sums(sums[row], args.parts->rank_count, args.t + row * kRankLanes);
  }
}

template <class X, class W, int kRanks>
PAGEDLORA_INLINE void shrink_ranks(const ShrinkArgs& args) {
  if (args.num_rows == 1) {
    shrink_row<X, W, kRanks>(args);
  } else {
    shrink_tile<X, W, kRanks>(args);
  }
}

template <class X, class W>
void shrink(const ShrinkArgs& args) {
  if (args.parts->rank_count <= 4) {
    shrink_ranks<X, W, 4>(args);
  } else {
    shrink_ranks<X, W, 8>(args);
  }
}

}  // namespace
}  // namespace pagedlora::internal
