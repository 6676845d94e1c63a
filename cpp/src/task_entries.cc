#include "pagedlora/task_entries.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "internal/lora_combine.h"

namespace pagedlora {
namespace {

std::uint32_t slots_of(const Part& part, std::uint32_t ranks, std::size_t element_bytes) {
  const std::size_t bytes = std::size_t{part.length} * ranks * element_bytes;
  return static_cast<std::uint32_t>((bytes + kSlotBytes - 1) / kSlotBytes);
}

// Where the features from `begin` on lie; 0 without such a vector.
std::uint64_t address_of(const TaskPages& task, std::span<const Part> parts, std::uint32_t begin) {
  for (const Part& part : parts) {
    if (begin < part.begin + part.length) {
      return std::bit_cast<std::uintptr_t>(task.address(part.at)) +
             (begin - part.begin) * sizeof(float);
    }
  }
  return 0;
}

// Outputs [begin, end) of the part of B.
TaskLayerModuleConfig make_entry(const TaskPages& task, const LoraModule& module,
                                 const Block& block, const Part& a, const Part& b,
                                 std::uint32_t begin, std::uint32_t end) {
  const std::size_t element_bytes = task.layout->params().element_bytes;
  TaskLayerModuleConfig entry;
  entry.page_id = task.pages[a.at.page].value;
  entry.slot_idx = a.at.slot;
  entry.out_page_id = task.pages[b.at.page].value;
  entry.out_slot_idx = b.at.slot;
  const RowShape& row = task.layout->rows()[block.row];
  entry.in_offset = row.in.offset + a.begin;
  entry.in_size = a.length;
  entry.out_offset = row.out.offset + begin;
  entry.out_size = end - begin;
  entry.module_id = module.module_id;
  entry.layer_id = module.layer_id;
  entry.adapter_size = block.rank_count;
  entry.num_slots =
      slots_of(a, block.rank_count, element_bytes) + slots_of(b, block.rank_count, element_bytes);
  entry.scale = task.scales[block.row];
  entry.weights_in_pointer = std::bit_cast<std::uintptr_t>(task.address(a.at));
  entry.weights_out_pointer = std::bit_cast<std::uintptr_t>(task.address(b.at)) +
                              std::uint64_t{begin - b.begin} * block.rank_count * element_bytes;
  entry.scaling_vec_pointer = address_of(task, task.layout->dora_scale_parts(block.row), begin);
  entry.bias_pointer = address_of(task, task.layout->bias_parts(block.row), begin);
  entry.module_name = module.name;
  return entry;
}

// A part of A [features, ranks of the block] into A [rank, in_features].
void gather_transposed(const TaskPages& task, const Block& block, const Part& part,
                       std::size_t in_features, std::byte* a) {
  const std::size_t element = task.layout->params().element_bytes;
  for (std::size_t feature = 0; feature < part.length; ++feature) {
    for (std::size_t rank = 0; rank < block.rank_count; ++rank) {
      std::memcpy(a + ((block.rank_begin + rank) * in_features + part.begin + feature) * element,
                  task.address(part.at) + (feature * block.rank_count + rank) * element, element);
    }
  }
}

// Where the tile of the row's vectors that holds the feature ends. Both are tiled alike.
std::uint32_t end_of_tile(const Layout& layout, std::uint32_t row, std::uint32_t feature) {
  for (const std::span<const Part> parts : {layout.bias_parts(row), layout.dora_scale_parts(row)}) {
    for (const Part& part : parts) {
      if (feature < part.begin + part.length) {
        return part.begin + part.length;
      }
    }
  }
  return std::numeric_limits<std::uint32_t>::max();
}

}  // namespace

std::vector<TaskLayerModuleConfig> task_entries(const TaskPages& task,
                                                const LoraModelConfig& config) {
  std::vector<TaskLayerModuleConfig> entries;
  for (const Block& block : task.layout->blocks()) {
    const LoraModule& module = config.module(task.layout->rows()[block.row].module);
    for (const Part& a : task.layout->a_parts(block)) {
      for (const Part& b : task.layout->b_parts(block)) {
        const std::uint32_t end = b.begin + b.length;
        for (std::uint32_t begin = b.begin; begin < end;) {
          const std::uint32_t next = std::min(end, end_of_tile(*task.layout, block.row, begin));
          entries.push_back(make_entry(task, module, block, a, b, begin, next));
          begin = next;
        }
      }
    }
  }
  return entries;
}

void gather_row(const TaskPages& task, std::uint32_t row, std::byte* a, std::byte* b) {
  const Layout& layout = *task.layout;
  const RowShape shape = layout.rows()[row];
  const std::size_t in_features = shape.in.length;
  const std::size_t element = layout.params().element_bytes;
  for (const Block& block : layout.blocks_of_row(row)) {
    for (const Part& part : layout.a_parts(block)) {
      if (shape.kind == ModuleKind::embedding) {
        gather_transposed(task, block, part, in_features, a);
        continue;
      }
      for (std::size_t rank = 0; rank < block.rank_count; ++rank) {
        std::memcpy(a + ((block.rank_begin + rank) * in_features + part.begin) * element,
                    task.address(part.at) + rank * part.length * element, part.length * element);
      }
    }
    for (const Part& part : layout.b_parts(block)) {
      for (std::size_t out = 0; out < part.length; ++out) {
        std::memcpy(b + ((part.begin + out) * shape.rank + block.rank_begin) * element,
                    task.address(part.at) + out * block.rank_count * element,
                    block.rank_count * element);
      }
    }
  }
}

void gather_vector(const TaskPages& task, std::span<const Part> parts, float* into) {
  if (!parts.empty()) {
    internal::copy_features(task, parts, 0, parts.back().begin + parts.back().length, into);
  }
}

}  // namespace pagedlora
