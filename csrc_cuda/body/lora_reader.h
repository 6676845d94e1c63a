// How the LoRA kernels find a tile's task, and the weights of it that they need.
//
// A view of tables; plain value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "body/kernel_index.h"
#include "body/memory_access.h"
#include "pagedlora/cuda/lora_records.h"
#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

// One tile and the module of its task that a launch is about.
//
// Records are read whole, as words of up to 16 bytes. What does not depend on each other is asked for
// before any of it is looked at: a chain of loads, each waiting for the one before, is what a kernel
// of few bytes spends its time on.
class LoraReader {
 public:
  // With no rows if there is no such tile, or its task does not touch the module.
  PAGEDLORA_HOST_DEVICE LoraReader(const LoraTablesView& view, std::uint32_t tile,
                                   std::uint32_t module)
      : base_(view.base) {
    const std::uint32_t last = view.max_tokens - 1;  // a tile is there, if not of this batch
    const auto header = record<LoraHeader, kVectorBytes>(0, 0);
    const auto found =
        record<LoraTile, kVectorBytes>(sizeof(LoraHeader), tile < last ? tile : last);
    if ((tile >= header.num_tiles) | (found.num_tokens == 0)) {  // so that both are asked for first
      return;
    }
    tile_ = found;
    order_ = header.order + tile_.first * static_cast<std::uint32_t>(sizeof(std::uint32_t));
    task_ = record<LoraTaskEntry, kVectorBytes>(view.tasks, tile_.task);
    if (module < task_.num_modules) {
      module_ = record<LoraModuleEntry, kVectorBytes>(task_.modules, module);
    }
  }

  PAGEDLORA_HOST_DEVICE const LoraModuleEntry& module() const { return module_; }

  // How many times `tokens_per_round` tokens the tile has; none if there is nothing to do.
  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(std::uint32_t tokens_per_round) const {
    return module_.num_rows == 0 ? 0 : (tile_.num_tokens + tokens_per_round - 1) / tokens_per_round;
  }
  PAGEDLORA_HOST_DEVICE std::uint32_t num_tokens() const { return tile_.num_tokens; }

  // Of the tile's i-th token: its row in x and y, and its place in rank space.
  PAGEDLORA_HOST_DEVICE std::uint32_t position(std::uint32_t i) const {
    return record<std::uint32_t>(order_, i);
  }
  PAGEDLORA_HOST_DEVICE std::uint32_t rank_space_row(std::uint32_t i) const {
    return tile_.first + i;
  }

  // Rows and blocks are counted in the layout, parts too.
  PAGEDLORA_HOST_DEVICE LoraRowEntry row(std::uint32_t index) const {
    return record<LoraRowEntry, 8>(task_.rows, index);
  }
  PAGEDLORA_HOST_DEVICE LoraBlockEntry block(std::uint32_t index) const {
    return record<LoraBlockEntry, kVectorBytes>(task_.blocks, index);
  }
  PAGEDLORA_HOST_DEVICE Part part(std::uint32_t index) const {
    return record<Part, kVectorBytes>(task_.parts, index);
  }
  PAGEDLORA_HOST_DEVICE float scale(std::uint32_t row) const {
    return record<float>(task_.scales, row);
  }

  // All parts have the same length but the last. The one with a feature, of `count` from `first` on.
  PAGEDLORA_HOST_DEVICE Part part_with(std::uint32_t first, std::uint32_t count,
                                       std::uint32_t feature) const {
    return count == 1 ? part(first) : part(first + feature / part(first).length);
  }

  PAGEDLORA_HOST_DEVICE std::uint32_t page(const Part& part) const {
    return record<std::uint32_t>(task_.pages, part.at.page);
  }
  PAGEDLORA_HOST_DEVICE const std::byte* address(const Part& part, std::uint32_t page) const {
    return task_.pool + page * task_.page_bytes + std::size_t{part.at.slot} * kSlotBytes;
  }
  PAGEDLORA_HOST_DEVICE const std::byte* address(const Part& part) const {
    return address(part, page(part));
  }

  // Of a vector in float32 (bias, DoRA scale).
  PAGEDLORA_HOST_DEVICE float element(std::uint32_t first, std::uint32_t count,
                                      std::uint32_t feature) const {
    const Part place = part_with(first, count, feature);
    return load<float>(address(place) + std::size_t{feature - place.begin} * sizeof(float));
  }

 private:
  template <class T, std::size_t kAlignment = alignof(T)>
  PAGEDLORA_HOST_DEVICE T record(std::uint32_t offset, std::uint32_t index) const {
    static_assert(sizeof(T) % kAlignment == 0);  // and LoraTables sees to the offsets
    return load<T, kAlignment>(base_ + offset + std::size_t{index} * sizeof(T));
  }

  const std::byte* base_;
  LoraTile tile_{};
  std::uint32_t order_ = 0;
  LoraTaskEntry task_{};
  LoraModuleEntry module_{};
};

// A thread of a LoRA kernel.
struct LoraThread {
  KernelIndex index;
  LoraReader reader;

  PAGEDLORA_HOST_DEVICE LoraThread(const KernelIndex& at, const LoraTablesView& tables,
                                   std::uint32_t module)
      : index(at), reader(tables, at.block_x, module) {}

  // If thread blocks count the module's blocks of ranks in y.
  PAGEDLORA_HOST_DEVICE std::uint32_t rounds_of_block(std::uint32_t tokens_per_round) const {
    return index.block_y < reader.module().num_blocks ? reader.rounds(tokens_per_round) : 0;
  }
  PAGEDLORA_HOST_DEVICE LoraBlockEntry block() const {
    return reader.block(reader.module().first_block + index.block_y);
  }
};

inline constexpr std::uint32_t kChunk = kMaxBlockRanks;  // elements that a lane takes at a time

// `count` (1..8) weights from `from` on, and zeros behind them. 16 bytes at a time if there are 8 and
// they are aligned.
template <class W>
PAGEDLORA_HOST_DEVICE inline Pack<W, kChunk> load_chunk(const std::byte* from,
                                                        std::uint32_t count) {
  using Eight = Pack<W, kChunk>;
  if (count == kChunk && is_multiple(from, Eight::kAlignment)) {
    return load<Eight>(from);
  }
  Eight chunk{};
  PAGEDLORA_UNROLL
  for (std::uint32_t i = 0; i < kChunk; ++i) {
    if (i < count) {
      chunk.values[i] = load<W>(from + i * sizeof(W));
    }
  }
  return chunk;
}

// Offset in rank space, in floats, of the 8 numbers of one token and one block.
PAGEDLORA_HOST_DEVICE inline std::size_t rank_space_offset(const LoraTablesView& view,
                                                           std::uint32_t row,
                                                           std::uint32_t block_of_module) {
  return (std::size_t{row} * view.max_blocks + block_of_module) * kMaxBlockRanks;
}

}  // namespace pagedlora::cuda
