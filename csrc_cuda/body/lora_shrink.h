// The shrink kernel's body: t = scale * A x in float32, for a tile of tokens and a block of ranks.
//
// Thread blocks: x counts tiles; y counts, in steps of `blocks_y`, units: some ranks of one of the
// module's blocks of the tile's task. A thread is a lane. Order of the sums, whatever the tile, the
// number of tokens in it, the grid and the alignment of anything:
//   1 of every part of A, in order, lane l takes the features 8 (l + 128 n) .. + 7 for n = 0, 1, ...,
//     and adds their products one after the other, each fused with its addition
//   2 the lanes are added in a tree: l and l + 64, then l and l + 32, down to l and l + 1
//   3 the sum is multiplied by the row's scale
// A warp reads 512 neighbouring bytes of each rank's row of A at a time (bfloat16).
//
// For one token a unit is 2 ranks, so that a few adapters keep all of the device busy, and a lane has
// the weights of 8 n (bfloat16) under way at once: it is latency that decides there. For four tokens
// it is a whole block, whose weights are read once for all of them.
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
  static constexpr std::uint32_t kResidentBlocks = kTokens == 1 ? 4 : 3;
  static constexpr bool kLetsNextStart = true;
  static constexpr std::uint32_t kPhases = 3;
  using Thread = LoraThread;
  static constexpr std::uint32_t kRanks = kTokens == 1 ? 2 : kMaxBlockRanks;  // of a unit
  static constexpr std::uint32_t kUnits = kMaxBlockRanks / kRanks;            // of a block
  static constexpr std::uint32_t kSums = kTokens * kRanks;                    // of a lane
  static constexpr std::uint32_t kLanesLeft = 16;                             // by the second phase

  // What registers hold: values of n, and ranks of each, that are under way together.
  static constexpr std::uint32_t kSlices =
      kTokens == 1 ? 8 / (sizeof(X) > sizeof(W) ? sizeof(X) : sizeof(W)) : 1;
  static constexpr std::uint32_t kRanksAtOnce = kTokens == 1 ? kRanks : 4;

  struct Shared {
    float sums[kSums][kThreads + 1];  // one more: neighbouring sums lie in other banks
    float scale;
  };

  LoraTablesView tables;
  std::uint32_t module;
  const X* x;  // [tokens of the batch, in_features]
  std::int64_t x_row_stride;
  float* t;                // [max_tokens, max_blocks, 8]
  std::uint32_t blocks_y;  // of the grid

  PAGEDLORA_HOST_DEVICE Thread start(const KernelIndex& index) const {
    return {index, tables, module};
  }

  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(const Thread& thread) const {
    const std::uint32_t units = thread.reader.module().num_blocks * kUnits;
    const std::uint32_t first = thread.index.block_y;
    const std::uint32_t own = first < units ? (units - first + blocks_y - 1) / blocks_y : 0;
    return own * thread.reader.rounds(kTokens);
  }

  PAGEDLORA_HOST_DEVICE void run(std::uint32_t phase, std::uint32_t round, const Thread& thread,
                                 Shared& shared) const {
    const Unit unit = unit_of(round, thread);
    if (phase == 0) {
      sum_lane(unit, thread, shared);
    } else if (phase == 1) {
      add_far_lanes(thread.index.thread, shared);
    } else {
      write(unit, thread, shared);
    }
  }

 private:
  struct Unit {
    std::uint32_t block;  // of the module
    std::uint32_t first_rank;
    std::uint32_t first_token;
  };
  struct Sums {
    float of[kTokens][kRanks];
  };
  struct Rows {
    const std::byte* of[kTokens];  // the slice of x that the row of A multiplies
  };
  // What a lane takes of a part for one n.
  struct Slice {
    const std::byte* weights;  // of the unit's first rank
    std::uint32_t length;      // of the part: from there to the next rank, in elements
    std::uint32_t feature;     // of the row
    std::uint32_t count;       // of features: 8, fewer at the end of the part, or none
  };

  PAGEDLORA_HOST_DEVICE Unit unit_of(std::uint32_t round, const Thread& thread) const {
    const std::uint32_t token_rounds = thread.reader.rounds(kTokens);
    const std::uint32_t unit = thread.index.block_y + round / token_rounds * blocks_y;
    return {unit / kUnits, unit % kUnits * kRanks, round % token_rounds * kTokens};
  }

  PAGEDLORA_HOST_DEVICE void sum_lane(const Unit& unit, const Thread& thread,
                                      Shared& shared) const {
    const LoraReader& reader = thread.reader;
    const LoraBlockEntry block = reader.block(reader.module().first_block + unit.block);
    const std::uint32_t ranks =
        unit.first_rank < block.rank_count ? block.rank_count - unit.first_rank : 0;
    const float scale = reader.scale(block.row);
    Sums sums{};
    if (ranks > 0) {
      const Rows rows = rows_of(unit, reader, block);
      const std::uint32_t slices_per_part =
          (block.a_tile + kThreads * kChunk - 1) / (kThreads * kChunk);  // fewer in the last
      const std::uint32_t num_slices = slices_per_part * block.num_a_parts;
      for (std::uint32_t first = 0; first < num_slices; first += kSlices) {
        Slice slices[kSlices];
        find_slices(reader, block, unit.first_rank, slices_per_part, first,
                    thread.index.thread * kChunk, slices);
        if (are_vectors(slices, rows)) {
          add_vectors(slices, ranks, rows, sums);
        } else {
          add_elements(slices, ranks, rows, sums);
        }
      }
    }
    if (thread.index.thread == 0) {
      shared.scale = scale;
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSums; ++i) {
      shared.sums[i][thread.index.thread] = sums.of[i / kRanks][i % kRanks];
    }
  }

  PAGEDLORA_HOST_DEVICE Rows rows_of(const Unit& unit, const LoraReader& reader,
                                     const LoraBlockEntry& block) const {
    const std::uint32_t in_offset = reader.row(block.row).in.offset;
    const std::uint32_t last = reader.num_tokens() - 1;  // again, where there are no more tokens
    Rows rows;
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      const std::uint32_t i = unit.first_token + token;
      const std::uint32_t position = reader.position(i < last ? i : last);
      rows.of[token] = reinterpret_cast<const std::byte*>(x + position * x_row_stride + in_offset);
    }
    return rows;
  }

  // From `first` on, counted through all parts. What each step of the way needs is asked for at once.
  PAGEDLORA_HOST_DEVICE static void find_slices(const LoraReader& reader,
                                                const LoraBlockEntry& block,
                                                std::uint32_t first_rank,
                                                std::uint32_t slices_per_part, std::uint32_t first,
                                                std::uint32_t of_lane, Slice (&slices)[kSlices]) {
    Part parts[kSlices];
    std::uint32_t pages[kSlices];
    std::uint32_t n[kSlices];
    std::uint32_t part = first / slices_per_part;
    std::uint32_t next = first - part * slices_per_part;
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSlices; ++i) {
      const bool is_there = part < block.num_a_parts;
      n[i] = is_there ? next : slices_per_part;  // of the last part, which has none there
      parts[i] = reader.part(block.a + (is_there ? part : block.num_a_parts - 1));
      ++next;
      if (next == slices_per_part) {
        next = 0;
        ++part;
      }
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSlices; ++i) {
      pages[i] = reader.page(parts[i]);
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSlices; ++i) {
      const std::uint32_t in_part = n[i] * kThreads * kChunk + of_lane;
      const std::uint32_t left = in_part < parts[i].length ? parts[i].length - in_part : 0;
      slices[i].length = parts[i].length;
      slices[i].weights = reader.address(parts[i], pages[i]) +
                          (std::size_t{first_rank} * parts[i].length + in_part) * sizeof(W);
      slices[i].feature = parts[i].begin + in_part;
      slices[i].count = left < kChunk ? left : kChunk;
    }
  }

  PAGEDLORA_HOST_DEVICE static bool are_vectors(const Slice (&slices)[kSlices], const Rows& rows) {
    bool are = true;
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSlices; ++i) {
      bool is_aligned = slices[i].length % (kVectorBytes / sizeof(W)) == 0;
      PAGEDLORA_UNROLL
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        const std::byte* features = rows.of[token] + std::size_t{slices[i].feature} * sizeof(X);
        is_aligned = is_aligned && is_multiple(features, kVectorBytes);
      }
      are = are && (slices[i].count == 0 || (slices[i].count == kChunk && is_aligned));
    }
    return are;
  }

  PAGEDLORA_HOST_DEVICE static const std::byte* weights_of(const Slice& slice, std::uint32_t rank) {
    return slice.weights + std::size_t{rank} * slice.length * sizeof(W);
  }

  PAGEDLORA_HOST_DEVICE static void add_vectors(const Slice (&slices)[kSlices], std::uint32_t ranks,
                                                const Rows& rows, Sums& sums) {
    PAGEDLORA_UNROLL
    for (std::uint32_t rank = 0; rank < kRanks; rank += kRanksAtOnce) {
      Pack<W, kChunk> a[kSlices][kRanksAtOnce];
      Pack<X, kChunk> features[kSlices][kTokens];
      PAGEDLORA_UNROLL
      for (std::uint32_t i = 0; i < kSlices; ++i) {  // all loads first: they wait together
        PAGEDLORA_UNROLL
        for (std::uint32_t r = 0; r < kRanksAtOnce; ++r) {
          if (slices[i].count != 0 && rank + r < ranks) {
            a[i][r] = load<Pack<W, kChunk>>(weights_of(slices[i], rank + r));
          }
        }
      }
      wait_for_stream();
      PAGEDLORA_UNROLL
      for (std::uint32_t i = 0; i < kSlices; ++i) {
        PAGEDLORA_UNROLL
        for (std::uint32_t token = 0; token < kTokens; ++token) {
          if (slices[i].count != 0) {
            features[i][token] =
                load<Pack<X, kChunk>>(rows.of[token] + std::size_t{slices[i].feature} * sizeof(X));
          }
        }
      }
      PAGEDLORA_UNROLL
      for (std::uint32_t i = 0; i < kSlices; ++i) {
        PAGEDLORA_UNROLL
        for (std::uint32_t r = 0; r < kRanksAtOnce; ++r) {
          if (slices[i].count != 0 && rank + r < ranks) {
            add_products(a[i][r], features[i], rank + r, sums);
          }
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
  PAGEDLORA_HOST_DEVICE static void add_elements(const Slice (&slices)[kSlices],
                                                 std::uint32_t ranks, const Rows& rows,
                                                 Sums& sums) {
    wait_for_stream();
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kSlices; ++i) {
      PAGEDLORA_NO_UNROLL
      for (std::uint32_t k = 0; k < slices[i].count; ++k) {
        float features[kTokens];
        PAGEDLORA_UNROLL
        for (std::uint32_t token = 0; token < kTokens; ++token) {
          features[token] =
              widen(load<X>(rows.of[token] + std::size_t{slices[i].feature + k} * sizeof(X)));
        }
        PAGEDLORA_UNROLL
        for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
          if (rank < ranks) {
            const float a = widen(load<W>(weights_of(slices[i], rank) + k * sizeof(W)));
            PAGEDLORA_UNROLL
            for (std::uint32_t token = 0; token < kTokens; ++token) {
              add_product(a, features[token], sums.of[token][rank]);
            }
          }
        }
      }
    }
  }

  PAGEDLORA_HOST_DEVICE static void add_product(float a, float b, float& sum) {
    sum = multiply_add(a, b, sum);
  }

  // The tree's steps of 64, 32 and 16: lane l gets all lanes l + 16 m. Threads share the sums.
  PAGEDLORA_HOST_DEVICE static void add_far_lanes(std::uint32_t thread, Shared& shared) {
    for (std::uint32_t i = thread; i < kLanesLeft * kSums; i += kThreads) {
      float* lanes = shared.sums[i / kLanesLeft];
      const std::uint32_t lane = i % kLanesLeft;
      lanes[lane] = add_lanes<kThreads / kLanesLeft>(lanes + lane, kLanesLeft);
    }
  }

  // Those of kCount / 2, kCount / 4, ..., 1 among lanes that lie `stride` apart.
  template <std::uint32_t kCount>
  PAGEDLORA_HOST_DEVICE static float add_lanes(const float* lanes, std::uint32_t stride) {
    static_assert(kCount <= 16);
    float values[kCount];
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kCount; ++i) {
      values[i] = lanes[i * stride];
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t step = 0; step < 4; ++step) {
      const std::uint32_t width = kCount / 2 >> step;
      PAGEDLORA_UNROLL
      for (std::uint32_t i = 0; i < kCount / 2; ++i) {
        if (i < width) {
          values[i] += values[i + width];
        }
      }
    }
    return values[0];
  }

  // And of 8, 4, 2 and 1. Lanes of the ranks that the block does not have are zero.
  PAGEDLORA_HOST_DEVICE void write(const Unit& unit, const Thread& thread,
                                   const Shared& shared) const {
    const LoraReader& reader = thread.reader;
    const std::uint32_t sum = thread.index.thread;
    const std::uint32_t i = unit.first_token + sum / kRanks;
    if (sum < kSums && i < reader.num_tokens()) {
      wait_for_stream();
      const std::size_t at = rank_space_offset(tables, reader.rank_space_row(i), unit.block) +
                             unit.first_rank + sum % kRanks;
      t[at] = add_lanes<kLanesLeft>(shared.sums[sum], 1) * shared.scale;
    }
  }
};

}  // namespace pagedlora::cuda
