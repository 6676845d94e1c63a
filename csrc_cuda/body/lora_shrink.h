// The shrink kernel's body: t = scale * A x in float32, for a tile of tokens and a block of ranks.
//
// Thread blocks: x counts tiles, y the module's blocks of the tile's task. A thread is a lane.
// Order of the sums, whatever the tile, the number of tokens in it and the alignment of anything:
//   1 of every part of A, in order, lane l takes the features 8 (l + 128 n) .. + 7 for n = 0, 1, ...,
//     and adds their products one after the other, each fused with its addition
//   2 the lanes are added in a tree: l and l + 64, then l and l + 32, down to l and l + 1
//   3 the sum is multiplied by the row's scale
// A warp reads 512 neighbouring bytes of each rank's row of A at a time (bfloat16).
#pragma once

#include <cstddef>
#include <cstdint>

#include "body/kernel_index.h"
#include "body/lora_reader.h"
#include "pagedlora/dtype.h"
#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

// X and W: types of x and of the weights. Weights are read once for up to kTokens tokens.
template <class X, class W, std::uint32_t kTokens>
struct LoraShrink {
  static constexpr std::uint32_t kThreads = 128;
  static constexpr std::uint32_t kTreeSteps = 7;
  static_assert(kThreads == 1U << kTreeSteps);
  static constexpr std::uint32_t kPhases = 1 + kTreeSteps + 1;
  using Thread = LoraThread;
  static constexpr std::uint32_t kRanksAtOnce = kTokens == 1 ? 8 : 4;  // what registers hold
  static constexpr std::uint32_t kSums = kTokens * kMaxBlockRanks;     // of a lane

  struct Shared {
    float sums[kSums][kThreads + 1];  // one more: neighbouring sums lie in other banks
  };

  LoraTablesView tables;
  std::uint32_t module;
  const X* x;  // [tokens of the batch, in_features]
  std::int64_t x_row_stride;
  float* t;  // [max_tokens, max_blocks, 8]

  PAGEDLORA_HOST_DEVICE Thread start(const KernelIndex& index) const {
    return {index, tables, module};
  }

  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(const Thread& thread) const {
    return thread.rounds_of_block(kTokens);
  }

  PAGEDLORA_HOST_DEVICE void run(std::uint32_t phase, std::uint32_t round, const Thread& thread,
                                 Shared& shared) const {
    if (phase == 0) {
      sum_lane(round, thread, shared);
    } else if (phase <= kTreeSteps) {
      add_lanes(kThreads >> phase, thread.index.thread, shared);
    } else {
      write(round, thread, shared);
    }
  }

 private:
  struct Sums {
    float of[kTokens][kMaxBlockRanks];
  };
  struct Rows {
    const std::byte* of[kTokens];  // the slice of x that the row of A multiplies
  };

  PAGEDLORA_HOST_DEVICE void sum_lane(std::uint32_t round, const Thread& thread,
                                      Shared& shared) const {
    const LoraReader& reader = thread.reader;
    const LoraBlockEntry& block = thread.block();
    const std::uint32_t in_offset = reader.row(block.row).in.offset;
    Rows rows;
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      const std::uint32_t i = round * kTokens + token;
      const std::uint32_t last = reader.num_tokens() - 1;  // again, where there are no more tokens
      const std::uint32_t position = reader.position(i < last ? i : last);
      rows.of[token] = reinterpret_cast<const std::byte*>(x + position * x_row_stride + in_offset);
    }
    Sums sums{};
    for (std::uint32_t part = 0; part < block.num_a_parts; ++part) {
      sum_part(reader, reader.part(block.a + part), block.rank_count, rows, thread.index.thread,
               sums);
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSums; ++i) {
      shared.sums[i][thread.index.thread] = sums.of[i / kMaxBlockRanks][i % kMaxBlockRanks];
    }
  }

  PAGEDLORA_HOST_DEVICE static void sum_part(const LoraReader& reader, const Part& part,
                                             std::uint32_t rank_count, Rows rows,
                                             std::uint32_t lane, Sums& sums) {
    const std::byte* a = reader.address(part);  // [rank_count, part.length]
    const std::size_t row_bytes = std::size_t{part.length} * sizeof(W);
    bool is_aligned = row_bytes % kVectorBytes == 0;
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      rows.of[token] += std::size_t{part.begin} * sizeof(X);
      is_aligned = is_aligned && is_multiple(rows.of[token], kVectorBytes);
    }
    for (std::uint32_t first = lane * kChunk; first < part.length; first += kThreads * kChunk) {
      const std::uint32_t count = part.length - first;
      const std::byte* weights = a + std::size_t{first} * sizeof(W);
      if (is_aligned && count >= kChunk) {
        add_vectors(weights, row_bytes, rank_count, rows, first, sums);
      } else {
        add_elements(weights, row_bytes, rank_count, rows, first, count < kChunk ? count : kChunk,
                     sums);
      }
    }
  }

  PAGEDLORA_HOST_DEVICE static void add_vectors(const std::byte* weights, std::size_t row_bytes,
                                                std::uint32_t rank_count, const Rows& rows,
                                                std::uint32_t first, Sums& sums) {
    Pack<X, kChunk> features[kTokens];
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      features[token] = load<Pack<X, kChunk>>(rows.of[token] + std::size_t{first} * sizeof(X));
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t rank = 0; rank < kMaxBlockRanks; rank += kRanksAtOnce) {
      Pack<W, kChunk> a[kRanksAtOnce];
      PAGEDLORA_UNROLL
      for (std::uint32_t r = 0; r < kRanksAtOnce; ++r) {  // all loads first: they wait together
        if (rank + r < rank_count) {
          a[r] = load<Pack<W, kChunk>>(weights + (rank + r) * row_bytes);
        }
      }
      PAGEDLORA_UNROLL
      for (std::uint32_t r = 0; r < kRanksAtOnce; ++r) {
        if (rank + r < rank_count) {
          add_products(a[r], features, rank + r, sums);
        }
      }
    }
  }

  PAGEDLORA_HOST_DEVICE static void add_products(const Pack<W, kChunk>& a,
                                                 const Pack<X, kChunk> (&features)[kTokens],
                                                 std::uint32_t rank, Sums& sums) {
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      PAGEDLORA_UNROLL
      for (std::uint32_t i = 0; i < kChunk; ++i) {
        add_product(widen(a.values[i]), widen(features[token].values[i]), sums.of[token][rank]);
      }
    }
  }

  // The same sums in the same order, for what is not aligned, and for the end of a part.
  PAGEDLORA_HOST_DEVICE static void add_elements(const std::byte* weights, std::size_t row_bytes,
                                                 std::uint32_t rank_count, const Rows& rows,
                                                 std::uint32_t first, std::uint32_t count,
                                                 Sums& sums) {
    PAGEDLORA_NO_UNROLL
    for (std::uint32_t i = 0; i < count; ++i) {
      float features[kTokens];
      PAGEDLORA_UNROLL
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        features[token] = widen(load<X>(rows.of[token] + std::size_t{first + i} * sizeof(X)));
      }
      PAGEDLORA_UNROLL
      for (std::uint32_t rank = 0; rank < kMaxBlockRanks; ++rank) {
        if (rank < rank_count) {
          const float a = widen(load<W>(weights + rank * row_bytes + i * sizeof(W)));
          PAGEDLORA_UNROLL
          for (std::uint32_t token = 0; token < kTokens; ++token) {
            add_product(a, features[token], sums.of[token][rank]);
          }
        }
      }
    }
  }

  PAGEDLORA_HOST_DEVICE static void add_product(float a, float b, float& sum) {
    sum = multiply_add(a, b, sum);
  }

  // Lane l gets lane l + width, for l < width; all threads share the additions.
  PAGEDLORA_HOST_DEVICE static void add_lanes(std::uint32_t width, std::uint32_t thread,
                                              Shared& shared) {
    for (std::uint32_t i = thread; i < width * kSums; i += kThreads) {
      const std::uint32_t sum = i / width;
      const std::uint32_t lane = i % width;
      shared.sums[sum][lane] += shared.sums[sum][lane + width];
    }
  }

  // Lanes of the ranks that the block does not have are zero.
  PAGEDLORA_HOST_DEVICE void write(std::uint32_t round, const Thread& thread,
                                   const Shared& shared) const {
    const LoraReader& reader = thread.reader;
    const std::uint32_t i = round * kTokens + thread.index.thread / kMaxBlockRanks;
    if (thread.index.thread < kSums && i < reader.num_tokens()) {
      const LoraBlockEntry& block = thread.block();
      const std::size_t at =
          rank_space_offset(tables, reader.rank_space_row(i), thread.index.block_y) +
          thread.index.thread % kMaxBlockRanks;
      t[at] = shared.sums[thread.index.thread][0] * reader.scale(block.row);
    }
  }
};

}  // namespace pagedlora::cuda
