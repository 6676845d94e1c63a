// What the shrink kernel is to a linear module, for an embedding: t = factor * scale * A[:, token].
//
// Thread blocks as in lora_shrink.h. A thread has one rank of one token. A token outside of the
// row's slice of the vocabulary gets zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "body/kernel_index.h"
#include "body/lora_reader.h"
#include "pagedlora/dtype.h"
#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

template <class W>
struct LoraLookUp {
  static constexpr std::uint32_t kThreads = 128;
  static constexpr std::uint32_t kTokens = kThreads / kMaxBlockRanks;
  static constexpr std::uint32_t kResidentBlocks = 8;
  static constexpr bool kLetsNextStart = true;
  static constexpr std::uint32_t kPhases = 1;
  using Shared = NoShared;
  using Thread = LoraThread;

  LoraTablesView tables;
  std::uint32_t module;
  const std::int64_t* token_ids;  // [tokens of the batch]
  float factor;                   // by which the module multiplies what it looks up
  float* t;                       // [max_tokens, max_blocks, 8]

  PAGEDLORA_HOST_DEVICE Thread start(const KernelIndex& index) const {
    return {index, tables, module};
  }

  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(const Thread& thread) const {
    return thread.rounds_of_block(kTokens);
  }

  PAGEDLORA_HOST_DEVICE void run(std::uint32_t /*phase*/, std::uint32_t round, const Thread& thread,
                                 Shared& /*shared*/) const {
    const LoraReader& reader = thread.reader;
    const std::uint32_t i = round * kTokens + thread.index.thread / kMaxBlockRanks;
    if (i >= reader.num_tokens()) {
      return;
    }
    wait_for_stream();
    const std::uint32_t rank = thread.index.thread % kMaxBlockRanks;
    const LoraBlockEntry block = thread.block();
    const FeatureRange vocabulary = reader.row(block.row).in;
    const std::int64_t feature = token_ids[reader.position(i)] - std::int64_t{vocabulary.offset};
    float value = 0.0F;
    if (feature >= 0 && feature < std::int64_t{vocabulary.length} && rank < block.rank_count) {
      const auto column = static_cast<std::uint32_t>(feature);
      const Part part = reader.part_with(block.a, block.num_a_parts, column);
      const std::size_t skipped = std::size_t{column - part.begin} * block.rank_count + rank;
      value = widen(load<W>(reader.address(part) + skipped * sizeof(W)));
    }
    t[rank_space_offset(tables, reader.rank_space_row(i), thread.index.block_y) + rank] =
        value * (reader.scale(block.row) * factor);
  }
};

}  // namespace pagedlora::cuda
