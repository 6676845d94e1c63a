// Compiled with AVX-512 flags: everything but the table has internal linkage (see avx512_lanes.h).
#if defined(PAGEDLORA_HAVE_AVX512)

#include "avx512_lanes.h"
#include "lora_kernels.h"

namespace pagedlora::internal {
namespace {

constexpr std::uint32_t kStep = 32;      // input features per iteration of shrink
constexpr std::uint32_t kOutLanes = 16;  // output features per iteration of expand
constexpr std::uint32_t kLineBytes = 64;

// Asks for the cache lines of next[offset, offset + bytes).
PAGEDLORA_INLINE void prefetch(const void* next, std::size_t offset, std::size_t bytes) {
  if (next != nullptr) {
    for (std::size_t line = 0; line < bytes; line += kLineBytes) {
      _mm_prefetch(static_cast<const char*>(next) + offset + line, _MM_HINT_T1);
    }
  }
}

// --- shrink

template <class X, class W, bool kMasked, int kRows, int kRanks>
PAGEDLORA_INLINE void shrink_step(const X* const (&x)[kRows], const W* const (&a)[kRanks],
                                  std::size_t i, __mmask32 mask, __m512 (&acc)[kRows][kRanks]) {
  Pair inputs[kRows];
  for (int row = 0; row < kRows; ++row) {
    inputs[row] = load_as<W, kMasked>(x[row] + i, mask);
  }
#pragma GCC unroll 8
  for (int rank = 0; rank < kRanks; ++rank) {
    const Pair weights = load_as<W, kMasked>(a[rank] + i, mask);
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      __m512& sum = acc[row][rank];
      sum = _mm512_fmadd_ps(weights.first, inputs[row].first, sum);
      sum = _mm512_fmadd_ps(weights.second, inputs[row].second, sum);
    }
  }
}

template <int kRanks>
PAGEDLORA_INLINE void add_sums(const __m512 (&acc)[kRanks], std::uint32_t rank_count, float* t) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 low = fold_to_lanes(acc);
  const __m512 high = kRanks == 8 ? fold_to_lanes(acc + (kRanks - 4)) : zero;
  const __mmask16 ranks = low_bits16(rank_count);
  const __m512 sums = sum_in_lanes(low, high, zero, zero);
  _mm512_mask_storeu_ps(t, ranks, _mm512_add_ps(_mm512_maskz_loadu_ps(ranks, t), sums));
}

// Ranks from rank_count up to kRanks repeat the last one; their sums are dropped.
template <class X, class W, int kRows, int kRanks>
void shrink_rows(const ShrinkArgs& args, std::uint32_t first_row) {
  const X* x[kRows];
  for (int row = 0; row < kRows; ++row) {
    x[row] = static_cast<const X*>(args.x) + (first_row + row) * args.x_row_stride;
  }
  const W* a[kRanks];
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::size_t from = rank < args.rank_count ? rank : args.rank_count - 1;
    a[rank] = static_cast<const W*>(args.a) + from * args.length;
  }
  __m512 acc[kRows][kRanks];
  for (auto& sums : acc) {
    for (__m512& sum : sums) {
      sum = _mm512_setzero_ps();
    }
  }
  const void* next = first_row == 0 ? args.read_next : nullptr;
  std::size_t i = 0;
  for (; i + kStep <= args.length; i += kStep) {
    prefetch(next, i * kRanks * sizeof(W), kStep * kRanks * sizeof(W));
    shrink_step<X, W, false, kRows, kRanks>(x, a, i, 0, acc);
  }
  if (i < args.length) {
    const __mmask32 rest = low_bits32(args.length - static_cast<std::uint32_t>(i));
    shrink_step<X, W, true, kRows, kRanks>(x, a, i, rest, acc);
  }
  for (std::uint32_t row = 0; row < kRows; ++row) {
    add_sums(acc[row], args.rank_count, args.t + (first_row + row) * kRankLanes);
  }
}

template <class X, class W, int kRanks>
PAGEDLORA_INLINE void shrink_ranks(const ShrinkArgs& args) {
  std::uint32_t row = 0;
  for (; row + 2 <= args.num_rows; row += 2) {
    shrink_rows<X, W, 2, kRanks>(args, row);
  }
  if (row < args.num_rows) {
    shrink_rows<X, W, 1, kRanks>(args, row);
  }
}

template <class X, class W>
void shrink(const ShrinkArgs& args) {
  if (args.rank_count <= 4) {
    shrink_ranks<X, W, 4>(args);
  } else {
    shrink_ranks<X, W, 8>(args);
  }
}

// --- expand: a quad is 4 output features by 8 ranks; each half of it by 4 of the ranks.

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
PAGEDLORA_INLINE Pair load_quad(const Bfloat16* from, const Spread& spread,
                                std::uint32_t num_outs) {
  return even_odd(load_quad_bits<kPacked>(from, spread, num_outs));
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

// t repeated to face the halves of a quad.
template <class W>
PAGEDLORA_INLINE Pair face_quad(const float* t) {
  const __m512 all = _mm512_broadcast_f32x8(_mm256_loadu_ps(t));
  if constexpr (kEvenOdd<W>) {
    return even_odd(Pair{all, all});
  } else {
    return ranks_in_halves(all, all);
  }
}

PAGEDLORA_INLINE __m512 multiply_quads(const Pair (&weights)[4], const Pair& t) {
  __m512 products[4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    products[quad] = _mm512_fmadd_ps(weights[quad].second, t.second,
                                     _mm512_mul_ps(weights[quad].first, t.first));
  }
  return sum_in_lanes(products[0], products[1], products[2], products[3]);
}

template <class W, bool kPacked>
PAGEDLORA_INLINE void expand_whole_step(const ExpandArgs& args, const Pair* t, const Spread& spread,
                                        std::uint32_t first_out) {
  const std::size_t ranks = kPacked ? args.rank_count : kRankLanes;
  const W* b = static_cast<const W*>(args.b) + first_out * ranks;
  Pair weights[4];
#pragma GCC unroll 4
  for (std::size_t quad = 0; quad < 4; ++quad) {
    weights[quad] = load_quad<kPacked>(b + 4 * quad * ranks, spread, 4);
  }
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    float* acc = args.acc + row * args.acc_row_stride + first_out;
    _mm512_storeu_ps(acc, _mm512_add_ps(_mm512_loadu_ps(acc), multiply_quads(weights, t[row])));
  }
}

// The last output features, fewer than kOutLanes.
template <class W>
void expand_rest(const ExpandArgs& args, const Pair* t, const Spread& spread,
                 std::uint32_t first_out) {
  const std::uint32_t num_outs = args.length - first_out;
  const W* b = static_cast<const W*>(args.b) + std::size_t{first_out} * args.rank_count;
  Pair weights[4];
  for (std::uint32_t quad = 0; quad < 4; ++quad) {
    const std::uint32_t done = num_outs < 4 * quad ? num_outs : 4 * quad;
    const std::uint32_t left = num_outs - done;
    weights[quad] = load_quad<true>(b + done * args.rank_count, spread, left < 4 ? left : 4);
  }
  const __mmask16 outs = low_bits16(num_outs);
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    float* acc = args.acc + row * args.acc_row_stride + first_out;
    const __m512 sums = multiply_quads(weights, t[row]);
    _mm512_mask_storeu_ps(acc, outs, _mm512_add_ps(_mm512_maskz_loadu_ps(outs, acc), sums));
  }
}

template <class W, bool kPacked>
PAGEDLORA_INLINE void expand_ranks(const ExpandArgs& args, const Pair* t, const Spread& spread) {
  std::uint32_t first = 0;
  for (; first + kOutLanes <= args.length; first += kOutLanes) {
    const std::size_t bytes = kOutLanes * sizeof(W) * (kPacked ? args.rank_count : kRankLanes);
    prefetch(args.read_next, first / kOutLanes * bytes, bytes);
    expand_whole_step<W, kPacked>(args, t, spread, first);
  }
  if (first < args.length) {
    expand_rest<W>(args, t, spread, first);
  }
}

template <class W>
void expand(const ExpandArgs& args) {
  Pair t[kTileRows];
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    t[row] = face_quad<W>(args.t + row * kRankLanes);
  }
  const Spread spread = spread_to_lanes(args.rank_count);
  if (args.rank_count == kRankLanes) {
    expand_ranks<W, false>(args, t, spread);
  } else {
    expand_ranks<W, true>(args, t, spread);
  }
}

// --- add

template <bool kMasked, class X>
PAGEDLORA_INLINE void add_step(const float* acc, X* y, __mmask16 mask) {
  const __m512 sum = kMasked ? _mm512_maskz_loadu_ps(mask, acc) : _mm512_loadu_ps(acc);
  store_y<kMasked>(y, mask, _mm512_add_ps(load_y<kMasked>(y, mask), sum));
}

template <class X>
void add(const AddArgs& args) {
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    const float* acc = args.acc + row * args.acc_row_stride;
    X* y = static_cast<X*>(args.y) + row * args.y_row_stride;
    std::uint32_t o = 0;
    for (; o + kOutLanes <= args.length; o += kOutLanes) {
      add_step<false>(acc + o, y + o, 0);
    }
    if (o < args.length) {
      add_step<true>(acc + o, y + o, low_bits16(args.length - o));
    }
  }
}

template <class X, class W>
constexpr LoraKernels kKernels{&shrink<X, W>, &expand<W>, &add<X>};

}  // namespace

const LoraKernels kAvx512LoraKernels[kNumDtypes][kNumDtypes] = {
    {kKernels<float, float>, kKernels<float, Float16>, kKernels<float, Bfloat16>},
    {kKernels<Float16, float>, kKernels<Float16, Float16>, kKernels<Float16, Bfloat16>},
    {kKernels<Bfloat16, float>, kKernels<Bfloat16, Float16>, kKernels<Bfloat16, Bfloat16>},
};

}  // namespace pagedlora::internal

#endif
