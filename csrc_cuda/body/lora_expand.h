// The expand kernel's body: y += B t, with the row's bias and DoRA scale (adapter_plan.h has the
// formula), for a tile of tokens and 128 outputs.
//
// Thread blocks: x counts tiles, y tiles of outputs. A thread has one output of each token; the
// weights of a block that it reads, 8 of an output, are 16 bytes in bfloat16, and its neighbour's
// follow. Order of the sums, whatever the tile:
//   1 the 8 products of a block: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), where each innermost
//     pair is one product and one fused multiplication and addition
//   2 the blocks of the row are added in order
//   3 bias, DoRA scale and y, in the order of the formula; y is rounded once per row
// Rows of one module (slices) are added one after the other, in the order of the layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "body/kernel_index.h"
#include "body/lora_reader.h"
#include "pagedlora/dtype.h"
#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

// Y and W: types of y and of the weights. Weights are read once for up to kTokens tokens.
template <class Y, class W, std::uint32_t kTokens>
struct LoraExpand {
  static constexpr std::uint32_t kThreads = 128;
  static constexpr std::uint32_t kResidentBlocks = 5;
  static constexpr bool kLetsNextStart = true;
  static constexpr std::uint32_t kPhases = 1;
  using Shared = NoShared;
  using Thread = LoraThread;

  LoraTablesView tables;
  std::uint32_t module;
  const float* t;  // [max_tokens, max_blocks, 8], of the shrink or look-up kernel
  Y* y;            // [tokens of the batch, out_features]
  std::int64_t y_row_stride;
  const Y* base_bias;  // [out_features], or null

  PAGEDLORA_HOST_DEVICE Thread start(const KernelIndex& index) const {
    return {index, tables, module};
  }

  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(const Thread& thread) const {
    return thread.reader.rounds(kTokens);
  }

  PAGEDLORA_HOST_DEVICE void run(std::uint32_t /*phase*/, std::uint32_t round, const Thread& thread,
                                 Shared& /*shared*/) const {
    const LoraReader& reader = thread.reader;
    const std::uint32_t output = thread.index.block_y * kThreads + thread.index.thread;
    const LoraModuleEntry& rows = reader.module();
    for (std::uint32_t row = rows.first_row; row < rows.first_row + rows.num_rows; ++row) {
      const LoraRowEntry entry = reader.row(row);
      if (output >= entry.out.offset && output - entry.out.offset < entry.out.length) {
        add_row(reader, entry, reader.scale(row), round * kTokens, output);
      }
    }
  }

 private:
  // Blocks whose weights are under way together.
  static constexpr std::uint32_t kBlocks = kTokens == 1 ? 4 : 2;

  struct Values {
    float of[kTokens];
  };

  PAGEDLORA_HOST_DEVICE void add_row(const LoraReader& reader, const LoraRowEntry& row, float scale,
                                     std::uint32_t first_token, std::uint32_t output) const {
    const std::uint32_t o = output - row.out.offset;
    const std::uint32_t num_tokens = reader.num_tokens() - first_token;
    const bool has_bias = row.num_bias_parts > 0;
    const bool has_dora_scale = row.num_dora_scale_parts > 0;
    const float bias = has_bias ? reader.element(row.bias, row.num_bias_parts, o) * scale : 0.0F;
    const float dora_scale =
        has_dora_scale ? reader.element(row.dora_scale, row.num_dora_scale_parts, o) : 1.0F;
    const float base = has_dora_scale && base_bias != nullptr ? widen(base_bias[output]) : 0.0F;
    std::int64_t places[kTokens] = {};
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      if (token < num_tokens) {
        places[token] = reader.position(first_token + token) * y_row_stride + output;
      }
    }
    Pack<W, kChunk> weights[kBlocks];
    load_weights(reader, row, 0, o, weights);
    wait_for_stream();
    Values before{};
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      if (token < num_tokens) {
        before.of[token] = widen(y[places[token]]);
      }
    }
    const Values products = multiply(reader, row, first_token, o, weights);
    PAGEDLORA_UNROLL
    for (std::uint32_t token = 0; token < kTokens; ++token) {
      if (token < num_tokens) {
        float delta = products.of[token] + bias;
        if (has_dora_scale) {
          delta = (dora_scale - 1.0F) * (before.of[token] - base) + dora_scale * delta;
        }
        y[places[token]] = narrow<Y>(before.of[token] + delta);
      }
    }
  }

  // B t of one output of the row; `weights` are those of its first blocks.
  PAGEDLORA_HOST_DEVICE Values multiply(const LoraReader& reader, const LoraRowEntry& row,
                                        std::uint32_t first_token, std::uint32_t o,
                                        Pack<W, kChunk> (&weights)[kBlocks]) const {
    Values products{};
    for (std::uint32_t first = 0; first < row.num_blocks; first += kBlocks) {
      if (first > 0) {
        load_weights(reader, row, first, o, weights);
      }
      PAGEDLORA_UNROLL
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        if (first_token + token < reader.num_tokens()) {
          add_blocks(reader, row, first, first_token + token, weights, products.of[token]);
        }
      }
    }
    return products;
  }

  // Of an output and the blocks from `first` on. What each step of the way to them needs is asked for
  // at once, for all blocks; behind the row's last block that block stands again.
  PAGEDLORA_HOST_DEVICE static void load_weights(const LoraReader& reader, const LoraRowEntry& row,
                                                 std::uint32_t first, std::uint32_t o,
                                                 Pack<W, kChunk> (&weights)[kBlocks]) {
    LoraBlockEntry blocks[kBlocks];
    Part parts[kBlocks];
    std::uint32_t pages[kBlocks];
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::uint32_t k = first + i < row.num_blocks ? first + i : row.num_blocks - 1;
      blocks[i] = reader.block(row.first_block + k);
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::uint32_t part = blocks[i].num_b_parts == 1 ? 0 : o / blocks[i].b_tile;
      parts[i] = reader.part(blocks[i].b + part);
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      pages[i] = reader.page(parts[i]);
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      if (first + i < row.num_blocks) {
        const std::size_t skipped = std::size_t{o - parts[i].begin} * blocks[i].rank_count;
        weights[i] = load_chunk<W>(reader.address(parts[i], pages[i]) + skipped * sizeof(W),
                                   blocks[i].rank_count);
      }
    }
  }

  // Of one token and the blocks from `first` on.
  PAGEDLORA_HOST_DEVICE void add_blocks(const LoraReader& reader, const LoraRowEntry& row,
                                        std::uint32_t first, std::uint32_t token,
                                        const Pack<W, kChunk> (&weights)[kBlocks],
                                        float& product) const {
    const std::uint32_t before = row.first_block - reader.module().first_block;  // of the module's
    Pack<float, kChunk> t_of_blocks[kBlocks];
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::uint32_t k = first + i < row.num_blocks ? first + i : row.num_blocks - 1;
      const std::size_t at = rank_space_offset(tables, reader.rank_space_row(token), before + k);
      t_of_blocks[i] = load<Pack<float, kChunk>>(reinterpret_cast<const std::byte*>(t + at));
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      if (first + i < row.num_blocks) {
        product += dot(weights[i], t_of_blocks[i]);
      }
    }
  }

  PAGEDLORA_HOST_DEVICE static float dot(const Pack<W, kChunk>& weights,
                                         const Pack<float, kChunk>& t_of_block) {
    float w[kChunk];
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kChunk; ++i) {
      w[i] = widen(weights.values[i]);
    }
    const float(&v)[kChunk] = t_of_block.values;
    const float sum01 = multiply_add(w[1], v[1], w[0] * v[0]);
    const float sum23 = multiply_add(w[3], v[3], w[2] * v[2]);
    const float sum45 = multiply_add(w[5], v[5], w[4] * v[4]);
    const float sum67 = multiply_add(w[7], v[7], w[6] * v[6]);
    return (sum01 + sum23) + (sum45 + sum67);
  }
};

}  // namespace pagedlora::cuda
