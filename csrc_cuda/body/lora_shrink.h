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
  static constexpr std::uint32_t kSums = kTokens * kMaxBlockRanks;  // of a lane

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

  PAGEDLORA_HOST_DEVICE void sum_lane(std::uint32_t round, const Thread& thread,
                                      Shared& shared) const {
    const LoraReader& reader = thread.reader;
    const LoraBlockEntry& block = thread.block();
    const std::uint32_t in_offset = reader.row(block.row).in.offset;
    const std::byte* rows[kTokens];
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      const std::uint32_t i = round * kTokens + token;
      rows[token] = i < reader.num_tokens() ? reinterpret_cast<const std::byte*>(
                                                  x + reader.position(i) * x_row_stride + in_offset)
                                            : nullptr;
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
                                             std::uint32_t rank_count,
                                             const std::byte* const (&rows)[kTokens],
                                             std::uint32_t lane, Sums& sums) {
    const std::byte* a = reader.address(part);  // [rank_count, part.length]
    for (std::uint32_t first = lane * kChunk; first < part.length; first += kThreads * kChunk) {
      const std::uint32_t left = part.length - first;
      const std::uint32_t count = left < kChunk ? left : kChunk;
      float features[kTokens][kChunk];
      PAGEDLORA_UNROLL
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        if (rows[token] != nullptr) {
          load_chunk<X>(rows[token] + (std::size_t{part.begin} + first) * sizeof(X), count,
                        features[token]);
        } else {
          PAGEDLORA_UNROLL
          for (std::uint32_t i = 0; i < kChunk; ++i) {
            features[token][i] = 0.0F;
          }
        }
      }
      PAGEDLORA_UNROLL
      for (std::uint32_t rank = 0; rank < kMaxBlockRanks; ++rank) {
        if (rank < rank_count) {
          float weights[kChunk];
          load_chunk<W>(a + (std::size_t{rank} * part.length + first) * sizeof(W), count, weights);
          PAGEDLORA_UNROLL
          for (std::uint32_t token = 0; token < kTokens; ++token) {
            PAGEDLORA_UNROLL
            for (std::uint32_t i = 0; i < kChunk; ++i) {
              sums.of[token][rank] =
                  multiply_add(weights[i], features[token][i], sums.of[token][rank]);
            }
          }
        }
      }
    }
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
