// The AVX-512 expand of LoraKernels; all of avx512_lanes.h applies.
//
// A sum begins at zero and is added rank by rank through all blocks, missing ranks as zeros,
// whatever the number of rows.
#pragma once

#include "avx512_lanes.h"
#include "lora_kernels.h"
#include "read_ahead.h"

namespace pagedlora::internal {
namespace {

constexpr std::uint32_t kOutLanes = 16;

// A quad is 4 output features by 8 ranks.

struct SpreadTable {
  alignas(64) std::uint16_t from[kRankLanes][32];
};

// Where rank r of output feature o lies in packed weights, for r < rank_count.
constexpr SpreadTable make_spread_table() {
  SpreadTable table{};
  for (std::uint32_t ranks = 1; ranks <= kRankLanes; ++ranks) {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t rank = lane % kRankLanes;
      table.from[ranks - 1][lane] =
          static_cast<std::uint16_t>(rank < ranks ? lane / kRankLanes * ranks + rank : 0);
    }
  }
  return table;
}

constexpr SpreadTable kSpread = make_spread_table();

// How the ranks of packed quads are spread to kRankLanes, the missing ones zero.
struct Spread {
  __m512i index16;
  __m512i index32;
  __mmask32 keep;
  std::uint32_t rank_count;
};

PAGEDLORA_INLINE Spread spread_to_lanes(std::uint32_t rank_count) {
  const __m512i index16 = _mm512_load_si512(kSpread.from[rank_count - 1]);
  return {index16, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(index16)),
          low_bits32(rank_count) * 0x01010101U, rank_count};
}

template <bool kPacked>
PAGEDLORA_INLINE __m512i load_quad_bits(const void* from, const Spread& spread,
                                        std::uint32_t num_outs) {
  if constexpr (kPacked) {
    const __mmask32 present = low_bits32(num_outs * spread.rank_count);
    const __m512i packed = _mm512_maskz_loadu_epi16(present, from);
    return _mm512_maskz_permutexvar_epi16(spread.keep, spread.index16, packed);
  } else {
    return _mm512_loadu_si512(from);
  }
}

PAGEDLORA_INLINE Pair ranks_in_halves(__m512 outs01, __m512 outs23) {
  return {_mm512_shuffle_f32x4(outs01, outs23, 0x88), _mm512_shuffle_f32x4(outs01, outs23, 0xDD)};
}

template <bool kPacked>
PAGEDLORA_INLINE Pair load_quad(const Float16* from, const Spread& spread, std::uint32_t num_outs) {
  const Pair outs = halves_of_float16(load_quad_bits<kPacked>(from, spread, num_outs));
  return ranks_in_halves(outs.first, outs.second);
}

PAGEDLORA_INLINE __m512 load_two_outs(const float* from, const Spread& spread,
                                      std::uint32_t num_outs) {
  const __mmask16 present = low_bits16(num_outs * spread.rank_count);
  return _mm512_maskz_permutexvar_ps(static_cast<__mmask16>(spread.keep), spread.index32,
                                     _mm512_maskz_loadu_ps(present, from));
}

template <bool kPacked>
PAGEDLORA_INLINE Pair load_quad(const float* from, const Spread& spread, std::uint32_t num_outs) {
  if constexpr (kPacked) {
    const std::uint32_t low = num_outs < 2 ? num_outs : 2;
    return ranks_in_halves(load_two_outs(from, spread, low),
                           load_two_outs(from + low * spread.rank_count, spread, num_outs - low));
  } else {
    return ranks_in_halves(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16));
  }
}

// Columns: the weights of kOutLanes output features, one register for each of kRankLanes ranks.
// From quads; two elements of bfloat16 are moved as one word, and only then widened.

template <bool kPacked>
PAGEDLORA_INLINE void quads_to_columns(const Bfloat16* const (&from)[4], const Spread& spread,
                                       const std::uint32_t (&num_outs)[4],
                                       __m512 (&columns)[kRankLanes]) {
  __m512 words[4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    words[quad] = _mm512_castsi512_ps(load_quad_bits<kPacked>(from[quad], spread, num_outs[quad]));
  }
  transpose_quads(words);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Pair ranks = even_odd(_mm512_castps_si512(words[i]));
    columns[2 * i] = ranks.first;
    columns[2 * i + 1] = ranks.second;
  }
}

template <bool kPacked, class W>
PAGEDLORA_INLINE void quads_to_columns(const W* const (&from)[4], const Spread& spread,
                                       const std::uint32_t (&num_outs)[4],
                                       __m512 (&columns)[kRankLanes]) {
  __m512 low[4];
  __m512 high[4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    const Pair ranks = load_quad<kPacked>(from[quad], spread, num_outs[quad]);
    low[quad] = ranks.first;
    high[quad] = ranks.second;
  }
  transpose_quads(low);
  transpose_quads(high);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    columns[i] = low[i];
    columns[4 + i] = high[i];
  }
}

// Of num_outs output features, at most kOutLanes, from `from` on. The others become zero.
template <class W>
PAGEDLORA_INLINE void load_columns(const W* from, const Spread& spread, std::uint32_t num_outs,
                                   __m512 (&columns)[kRankLanes]) {
  const W* quads[4];
  std::uint32_t counts[4];
#pragma GCC unroll 4
  for (std::uint32_t quad = 0; quad < 4; ++quad) {
    const std::uint32_t done = num_outs < 4 * quad ? num_outs : 4 * quad;
    const std::uint32_t left = num_outs - done;
    quads[quad] = from + std::size_t{done} * spread.rank_count;
    counts[quad] = left < 4 ? left : 4;
  }
  if (spread.rank_count == kRankLanes && num_outs == kOutLanes) {
    quads_to_columns<false>(quads, spread, counts, columns);
  } else {
    quads_to_columns<true>(quads, spread, counts, columns);
  }
}

template <class X>
PAGEDLORA_INLINE void add_to_y(const float* sums, X* y, std::uint32_t length) {
  std::uint32_t o = 0;
  for (; o + kOutLanes <= length; o += kOutLanes) {
    store_y<false>(y + o, 0, _mm512_add_ps(load_y<false>(y + o, 0), _mm512_loadu_ps(sums + o)));
  }
  if (o < length) {
    const __mmask16 rest = low_bits16(length - o);
    store_y<true>(y + o, rest, _mm512_add_ps(load_y<true>(y + o, rest), _mm512_loadu_ps(sums + o)));
  }
}

// One row: block by block, in the order of memory.
template <class X, class W>
void expand_row(const ExpandArgs& args) {
  float sums[kMaxExpandLength];
  for (std::uint32_t block = 0; block < args.num_blocks; ++block) {
    const Spread spread = spread_to_lanes(args.blocks[block].rank_count);
    const W* b = static_cast<const W*>(args.blocks[block].at);
    const float* t = args.t + block * kRankLanes;
    for (std::uint32_t o = 0; o < args.length; o += kOutLanes) {
      read_ahead(*args.ahead, kOutLanes * sizeof(W) * spread.rank_count);
      __m512 columns[kRankLanes];
      const std::uint32_t left = args.length - o;
      load_columns(b + std::size_t{o} * spread.rank_count, spread,
                   left < kOutLanes ? left : kOutLanes, columns);
      __m512 sum = block == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + o);
#pragma GCC unroll 8
      for (std::uint32_t rank = 0; rank < kRankLanes; ++rank) {
        sum = _mm512_fmadd_ps(columns[rank], _mm512_set1_ps(t[rank]), sum);
      }
      _mm512_storeu_ps(sums + o, sum);
    }
  }
  add_to_y(sums, static_cast<X*>(args.y), args.length);
}

constexpr std::uint32_t kPiece = 2 * kOutLanes;  // output features of a tile of rows at a time
constexpr std::uint32_t kPiecesAhead = 4;        // how early rows of y are asked for
constexpr std::uint32_t kPieceBlocks = 8;        // blocks whose columns are kept at a time

struct PieceColumns {
  __m512 ranks[kRankLanes][2];
};

template <int kRows>
void multiply_rows(const PieceColumns* columns, std::uint32_t num_blocks, const float* t,
                   std::size_t t_block_stride, __m512 (*into)[2]) {
  __m512 sums[kRows][2];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    sums[row][0] = into[row][0];
    sums[row][1] = into[row][1];
  }
  for (std::uint32_t block = 0; block < num_blocks; ++block, t += t_block_stride) {
#pragma GCC unroll 1
    for (std::uint32_t rank = 0; rank < kRankLanes; ++rank) {
      const __m512 first = columns[block].ranks[rank][0];
      const __m512 second = columns[block].ranks[rank][1];
#pragma GCC unroll 8
      for (std::uint32_t row = 0; row < kRows; ++row) {
        const __m512 factor = _mm512_set1_ps(t[row * kRankLanes + rank]);
        sums[row][0] = _mm512_fmadd_ps(first, factor, sums[row][0]);
        sums[row][1] = _mm512_fmadd_ps(second, factor, sums[row][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    into[row][0] = sums[row][0];
    into[row][1] = sums[row][1];
  }
}

// sums[row] += for blocks [first_block, first_block + num_blocks).
PAGEDLORA_INLINE void multiply_tile(const ExpandArgs& args, const PieceColumns* columns,
                                    std::uint32_t first_block, std::uint32_t num_blocks,
                                    __m512 (&sums)[kTileRows][2]) {
  const std::size_t stride = std::size_t{args.num_rows} * kRankLanes;
  const float* t = args.t + first_block * stride;
  std::uint32_t row = 0;
  for (; row + 8 <= args.num_rows; row += 8) {
    multiply_rows<8>(columns, num_blocks, t + row * kRankLanes, stride, sums + row);
  }
  if (row + 4 <= args.num_rows) {
    multiply_rows<4>(columns, num_blocks, t + row * kRankLanes, stride, sums + row);
    row += 4;
  }
  if (row + 2 <= args.num_rows) {
    multiply_rows<2>(columns, num_blocks, t + row * kRankLanes, stride, sums + row);
    row += 2;
  }
  if (row < args.num_rows) {
    multiply_rows<1>(columns, num_blocks, t + row * kRankLanes, stride, sums + row);
  }
}

template <class W>
PAGEDLORA_INLINE void load_piece(const WeightsPart& block, std::uint32_t first_out,
                                 std::uint32_t num_outs, PieceColumns& piece) {
  const Spread spread = spread_to_lanes(block.rank_count);
  const W* b = static_cast<const W*>(block.at) + std::size_t{first_out} * block.rank_count;
#pragma GCC unroll 2
  for (std::uint32_t half = 0; half < 2; ++half) {
    const std::uint32_t done = num_outs < kOutLanes * half ? num_outs : kOutLanes * half;
    const std::uint32_t left = num_outs - done;
    __m512 columns[kRankLanes];
    load_columns(b + std::size_t{done} * block.rank_count, spread,
                 left < kOutLanes ? left : kOutLanes, columns);
#pragma GCC unroll 8
    for (std::uint32_t rank = 0; rank < kRankLanes; ++rank) {
      piece.ranks[rank][half] = columns[rank];
    }
  }
}

// A row of y is read one cache line a piece, too rarely for processors to foresee it. Pieces after
// the end are mostly those of the next call.
template <class X>
PAGEDLORA_INLINE void prefetch_y(const ExpandArgs& args, std::uint32_t first_out) {
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    __builtin_prefetch(static_cast<const X*>(args.y) + row * args.y_row_stride + first_out);
  }
}

template <class X, class W>
void expand_tile(const ExpandArgs& args) {
  for (std::uint32_t first = 0; first < kPiecesAhead * kPiece; first += kPiece) {
    prefetch_y<X>(args, first);
  }
  for (std::uint32_t first = 0; first < args.length; first += kPiece) {
    prefetch_y<X>(args, first + kPiecesAhead * kPiece);
    const std::uint32_t left = args.length - first;
    const std::uint32_t num_outs = left < kPiece ? left : kPiece;
    __m512 sums[kTileRows][2];
    for (std::uint32_t row = 0; row < args.num_rows; ++row) {
      sums[row][0] = sums[row][1] = _mm512_setzero_ps();
    }
    for (std::uint32_t block = 0; block < args.num_blocks; block += kPieceBlocks) {
      const std::uint32_t more = args.num_blocks - block;
      const std::uint32_t num_blocks = more < kPieceBlocks ? more : kPieceBlocks;
      PieceColumns columns[kPieceBlocks];
      for (std::uint32_t i = 0; i < num_blocks; ++i) {
        read_ahead(*args.ahead, kPiece * sizeof(W) * args.blocks[block + i].rank_count);
        load_piece<W>(args.blocks[block + i], first, num_outs, columns[i]);
      }
      multiply_tile(args, columns, block, num_blocks, sums);
    }
    for (std::uint32_t row = 0; row < args.num_rows; ++row) {
      float wide[kPiece];
      _mm512_storeu_ps(wide, sums[row][0]);
      _mm512_storeu_ps(wide + kOutLanes, sums[row][1]);
      add_to_y(wide, static_cast<X*>(args.y) + row * args.y_row_stride + first, num_outs);
    }
  }
}

template <class X, class W>
void expand(const ExpandArgs& args) {
  if (args.num_rows == 1) {
    expand_row<X, W>(args);
  } else {
    expand_tile<X, W>(args);
  }
}

}  // namespace
}  // namespace pagedlora::internal
