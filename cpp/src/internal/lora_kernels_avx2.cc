// Compiled with AVX2 flags: everything but the table has internal linkage (see avx2_lanes.h).
#if defined(PAGEDLORA_HAVE_AVX2)

#include "avx2_lanes.h"
#include "lora_kernels.h"
#include "read_ahead.h"

namespace pagedlora::internal {
namespace {

constexpr std::uint32_t kStep = 2 * kWidth;  // input features per iteration of shrink
// --- shrink: a tile is kRows rows by kRanks ranks, one register of partial sums for each pair.
// Every tile adds in the same order, so its size changes no result.

template <class X, class W, int kRows, int kRanks>
PAGEDLORA_INLINE void shrink_step(const X* const (&x)[kRows], const W* const (&a)[kRanks],
                                  std::size_t i, Floats (&acc)[kRows][kRanks]) {
  Pair inputs[kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    inputs[row] = load_as<W>(x[row] + i);
  }
#pragma GCC unroll 8
  for (int rank = 0; rank < kRanks; ++rank) {
    const Pair weights = load_as<W>(a[rank] + i);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      Floats& sum = acc[row][rank];
      sum = fused(weights.first, inputs[row].first, sum);
      sum = fused(weights.second, inputs[row].second, sum);
    }
  }
}

// The last input features, fewer than kStep.
template <class X, class W, int kRows, int kRanks>
PAGEDLORA_INLINE void shrink_rest(const X* const (&x)[kRows], const W* const (&a)[kRanks],
                                  std::size_t i, std::size_t count, Floats (&acc)[kRows][kRanks]) {
  X inputs[kRows][kStep];
  W weights[kRanks][kStep];
  const X* padded_x[kRows];
  const W* padded_a[kRanks];
  for (int row = 0; row < kRows; ++row) {
    copy_part<kStep>(x[row] + i, count, inputs[row]);
    padded_x[row] = inputs[row];
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    copy_part<kStep>(a[rank] + i, count, weights[rank]);
    padded_a[rank] = weights[rank];
  }
  shrink_step<X, W, kRows, kRanks>(padded_x, padded_a, 0, acc);
}

template <int kRanks>
PAGEDLORA_INLINE void add_sums(const Floats (&acc)[kRanks], std::uint32_t num_ranks, float* t) {
  float sums[kRanks];
#pragma GCC unroll 2
  for (int rank = 0; rank < kRanks; rank += 4) {
    _mm_storeu_ps(sums + rank, sum_lanes(acc + rank));
  }
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    t[rank] += sums[rank];
  }
}

// Ranks from first_rank on, at most kRanks. Missing ones repeat the last; their sums are dropped.
template <class X, class W, int kRows, int kRanks>
void shrink_tile(const ShrinkArgs& args, const WeightsPart& part, std::uint32_t first_row,
                 std::uint32_t first_rank) {
  const X* x[kRows];
  for (std::uint32_t row = 0; row < kRows; ++row) {
    x[row] = static_cast<const X*>(args.x) + part.begin + (first_row + row) * args.x_row_stride;
  }
  const std::uint32_t left = part.rank_count - first_rank;
  const std::uint32_t num_ranks = left < kRanks ? left : kRanks;
  const W* a[kRanks];
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::size_t from = first_rank + (rank < num_ranks ? rank : num_ranks - 1);
    a[rank] = static_cast<const W*>(part.at) + from * part.length;
  }
  Floats acc[kRows][kRanks];
  for (auto& sums : acc) {
    for (Floats& sum : sums) {
      sum = zero();
    }
  }
  std::size_t i = 0;
  for (; i + kStep <= part.length; i += kStep) {
    if (first_row == 0) {
      read_ahead(*args.ahead, kStep * kRanks * sizeof(W));
    }
    shrink_step<X, W, kRows, kRanks>(x, a, i, acc);
  }
  if (i < part.length) {
    shrink_rest<X, W, kRows, kRanks>(x, a, i, part.length - i, acc);
  }
  for (std::uint32_t row = 0; row < kRows; ++row) {
    add_sums(acc[row], num_ranks, args.t + (first_row + row) * kRankLanes + first_rank);
  }
}

template <class X, class W, int kRows>
PAGEDLORA_INLINE void shrink_rows(const ShrinkArgs& args, const WeightsPart& part,
                                  std::uint32_t first_row) {
  for (std::uint32_t rank = 0; rank < part.rank_count; rank += 4) {
    shrink_tile<X, W, kRows, 4>(args, part, first_row, rank);
  }
}

template <class X, class W>
PAGEDLORA_INLINE void shrink_part(const ShrinkArgs& args, const WeightsPart& part) {
  std::uint32_t row = 0;
  for (; row + 2 <= args.num_rows; row += 2) {
    shrink_rows<X, W, 2>(args, part, row);
  }
  if (row < args.num_rows && part.rank_count > 4) {
    shrink_tile<X, W, 1, 8>(args, part, row, 0);
  } else if (row < args.num_rows) {
    shrink_tile<X, W, 1, 4>(args, part, row, 0);
  }
}

template <class X, class W>
void shrink(const ShrinkArgs& args) {
  for (std::uint32_t part = 0; part < args.num_parts; ++part) {
    shrink_part<X, W>(args, args.parts[part]);
  }
}

// --- Output features by kRankLanes ranks, kLaneOuts of them in a pair of registers: each 128-bit
// lane holds the even or the odd ranks of one, or its first or last four (see load_as).

constexpr std::size_t kLaneOuts = kWidth / 4;

PAGEDLORA_INLINE Pair load_outs(const Bfloat16* b) { return load_even_odd(b); }

template <class W>
PAGEDLORA_INLINE Pair load_outs(const W* b) {
  return {load_fours(b, b + kRankLanes), load_fours(b + 4, b + kRankLanes + 4)};
}

// t, so that it faces the ranks of load_outs.
template <class W>
PAGEDLORA_INLINE Pair face_outs(const float* t) {
  float twice[2 * kRankLanes];
  __builtin_memcpy(twice, t, kRankLanes * sizeof(float));
  __builtin_memcpy(twice + kRankLanes, t, kRankLanes * sizeof(float));
  if constexpr (kEvenOdd<W>) {
    return load_even_odd(twice);
  } else {
    return {load_fours(t, t), load_fours(t + 4, t + 4)};
  }
}

// Lane by lane, sums of four registers of kLaneOuts output features each come out interleaved.
PAGEDLORA_INLINE Floats in_order(Floats sums) {
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// --- expand: a piece is kWidth output features. Its sums over the ranks are added in one order,
// by expand_columns for any rows and ranks, and by expand_row, which is faster for one row of
// kRankLanes ranks: q[k] is the sum of a pair of products, the sum of a piece is
// (q[0] + q[2]) + (q[1] + q[3]), and then it is added to acc. A pair is neighbours (2 k, 2 k + 1)
// for weights that load as even and odd elements, and (k, k + 4) for the others.

template <class W, int kRanks>
PAGEDLORA_INLINE Floats sum_of_columns(const Floats (&weights)[kRanks], const float* t) {
  Floats q[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const int first = kEvenOdd<W> ? 2 * k : k;
    const int second = kEvenOdd<W> ? 2 * k + 1 : k + 4;
    if (first < kRanks) {
      q[k] = times(weights[first], broadcast(t[first]));
    }
    if (second < kRanks) {
      q[k] = fused(weights[second], broadcast(t[second]), q[k]);
    }
  }
  if (kEvenOdd<W> && kRanks == 4) {
    return plus(q[0], q[1]);
  }
  return plus(plus(q[0], q[2]), plus(q[1], q[3]));
}

// Reads kRanks weights of each output feature; those from rank_count on become zero.
template <class W, int kRanks>
PAGEDLORA_INLINE void load_piece(const W* b, std::uint32_t rank_count, Floats (&weights)[kRanks]) {
  const W* rows[kWidth];
#pragma GCC unroll 8
  for (std::size_t out = 0; out < kWidth; ++out) {
    rows[out] = b + out * rank_count;
  }
  load_columns(rows, weights);
#pragma GCC unroll 8
  for (std::uint32_t rank = 1; rank < kRanks; ++rank) {
    if (rank >= rank_count) {
      weights[rank] = zero();
    }
  }
}

// acc[row, o] += sum over r of b[o, r] * t[row, r], for one block.
struct BlockArgs {
  const float* t;  // [num_rows, kRankLanes]
  std::uint32_t num_rows;
  const void* b;  // [length, rank_count]
  std::uint32_t length;
  std::uint32_t rank_count;
  float* acc;  // [num_rows, length]
  std::int64_t acc_row_stride;
  ReadAhead* ahead;
};

// The last output features, kWidth or fewer, from a copy: load_piece reads kRanks of each.
template <class W, int kRanks>
void expand_rest(const BlockArgs& args, std::uint32_t first_out) {
  const std::uint32_t left = args.length - first_out;
  const std::uint32_t num_outs = left < kWidth ? left : kWidth;
  const std::size_t ranks = args.rank_count;
  W copy[(kWidth + 1) * kRanks];
  copy_part<(kWidth + 1) * kRanks>(static_cast<const W*>(args.b) + first_out * ranks,
                                   num_outs * ranks, copy);
  Floats weights[kRanks];
  load_piece<W, kRanks>(copy, args.rank_count, weights);
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    float* acc = args.acc + row * args.acc_row_stride + first_out;
    const Floats sum = sum_of_columns<W, kRanks>(weights, args.t + row * kRankLanes);
    float sums[kWidth];
    _mm256_storeu_ps(sums, plus(load_part(acc, num_outs), sum));
    __builtin_memcpy(acc, sums, num_outs * sizeof(float));
  }
}

template <class W, int kRanks>
PAGEDLORA_INLINE void expand_columns(const BlockArgs& args, std::uint32_t rank_count) {
  const W* b = static_cast<const W*>(args.b);
  const float* t = args.t;
  const std::uint32_t num_rows = args.num_rows;
  const std::int64_t stride = args.acc_row_stride;
  const std::size_t all = std::size_t{args.length} * rank_count;
  const std::size_t piece = std::size_t{kWidth} * rank_count;
  std::size_t at = 0;
  std::uint32_t first = 0;
  for (; at + piece - rank_count + kRanks <= all; at += piece, first += kWidth) {
    read_ahead(*args.ahead, kWidth * kRanks * sizeof(W));
    Floats weights[kRanks];
    load_piece<W, kRanks>(b + at, rank_count, weights);
    float* acc = args.acc + first;
    for (std::uint32_t row = 0; row < num_rows; ++row, acc += stride) {
      const Floats sum = sum_of_columns<W, kRanks>(weights, t + row * kRankLanes);
      _mm256_storeu_ps(acc, plus(load(acc), sum));
    }
  }
  for (; first < args.length; first += kWidth) {
    expand_rest<W, kRanks>(args, first);
  }
}

template <class W>
PAGEDLORA_INLINE void expand_row(const BlockArgs& args) {
  const W* b = static_cast<const W*>(args.b);
  const Pair t = face_outs<W>(args.t);
  float* acc = args.acc;
  const std::size_t length = args.length;
  std::uint32_t first = 0;
  for (; first + kWidth <= length; first += kWidth, b += kWidth * kRankLanes) {
    read_ahead(*args.ahead, kWidth * kRankLanes * sizeof(W));
    Floats products[4];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      const Pair weights = load_outs(b + i * kLaneOuts * kRankLanes);
      products[i] = fused(weights.second, t.second, times(weights.first, t.first));
    }
    _mm256_storeu_ps(acc + first, plus(load(acc + first), in_order(sum_in_lanes(products))));
  }
  if (first < length) {
    expand_rest<W, kRankLanes>(args, first);
  }
}

template <class W>
void expand_block(const BlockArgs& args) {
  if (args.rank_count == kRankLanes && args.num_rows == 1) {
    expand_row<W>(args);
  } else if (args.rank_count == kRankLanes) {
    expand_columns<W, kRankLanes>(args, kRankLanes);
  } else if (args.rank_count == 4) {
    expand_columns<W, 4>(args, 4);
  } else if (args.rank_count < 4) {
    expand_columns<W, 4>(args, args.rank_count);
  } else {
    expand_columns<W, kRankLanes>(args, args.rank_count);
  }
}

// --- The sums of a chunk of output features stay in the first-level cache.

constexpr std::uint32_t kChunkSums = 8192;

template <class X>
PAGEDLORA_INLINE void add(const float* acc, X* y, std::uint32_t length) {
  std::uint32_t o = 0;
  for (; o + kWidth <= length; o += kWidth) {
    store(y + o, plus(load(y + o), load(acc + o)));
  }
  if (o < length) {
    const std::uint32_t left = length - o;
    store_part(y + o, left, plus(load_part(y + o, left), load_part(acc + o, left)));
  }
}

template <class X, class W>
PAGEDLORA_INLINE void expand_chunk(const ExpandArgs& args, std::uint32_t first,
                                   std::uint32_t length) {
  float acc[kChunkSums];
  __builtin_memset(acc, 0, std::size_t{args.num_rows} * length * sizeof(float));
  const float* t = args.t;
  for (std::uint32_t block = 0; block < args.num_blocks; ++block) {
    const WeightsPart& part = args.blocks[block];
    expand_block<W>({.t = t,
                     .num_rows = args.num_rows,
                     .b = static_cast<const W*>(part.at) + std::size_t{first} * part.rank_count,
                     .length = length,
                     .rank_count = part.rank_count,
                     .acc = acc,
                     .acc_row_stride = length,
                     .ahead = args.ahead});
    t += std::size_t{args.num_rows} * kRankLanes;
  }
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    add(acc + std::size_t{row} * length, static_cast<X*>(args.y) + row * args.y_row_stride + first,
        length);
  }
}

template <class X, class W>
void expand(const ExpandArgs& args) {
  const std::uint32_t chunk = kChunkSums / args.num_rows / kWidth * kWidth;
  for (std::uint32_t first = 0; first < args.length; first += chunk) {
    const std::uint32_t left = args.length - first;
    expand_chunk<X, W>(args, first, left < chunk ? left : chunk);
  }
}

template <class X, class W>
constexpr LoraKernels kKernels{&shrink<X, W>, &expand<X, W>};

}  // namespace

const LoraKernels kAvx2LoraKernels[kNumDtypes][kNumDtypes] = {
    {kKernels<float, float>, kKernels<float, Float16>, kKernels<float, Bfloat16>},
    {kKernels<Float16, float>, kKernels<Float16, Float16>, kKernels<Float16, Bfloat16>},
    {kKernels<Bfloat16, float>, kKernels<Bfloat16, Float16>, kKernels<Bfloat16, Bfloat16>},
};

}  // namespace pagedlora::internal

#endif
