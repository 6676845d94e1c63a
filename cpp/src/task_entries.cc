#include "pagedlora/task_entries.h"

#include <bit>
#include <cstring>

namespace pagedlora {
namespace {

std::uint32_t slots_of(const Part& part, std::uint32_t ranks, std::size_t element_bytes) {
  const std::size_t bytes = std::size_t{part.length} * ranks * element_bytes;
  return static_cast<std::uint32_t>((bytes + kSlotBytes - 1) / kSlotBytes);
}

TaskLayerModuleConfig make_entry(const TaskPages& task, const LoraModule& module,
                                 const Block& block, const Part& a, const Part& b) {
  const std::size_t element_bytes = task.layout->params().element_bytes;
  TaskLayerModuleConfig entry;
  entry.page_id = task.pages[a.at.page].value;
  entry.slot_idx = a.at.slot;
  entry.out_page_id = task.pages[b.at.page].value;
  entry.out_slot_idx = b.at.slot;
  const RowShape& row = task.layout->rows()[block.row];
  entry.in_offset = row.in.offset + a.begin;
  entry.in_size = a.length;
  entry.out_offset = row.out.offset + b.begin;
  entry.out_size = b.length;
  entry.module_id = module.module_id;
  entry.layer_id = module.layer_id;
  entry.adapter_size = block.rank_count;
  entry.num_slots =
      slots_of(a, block.rank_count, element_bytes) + slots_of(b, block.rank_count, element_bytes);
  entry.scale = task.scales[block.row];
  entry.weights_in_pointer = std::bit_cast<std::uintptr_t>(task.address(a.at));
  entry.weights_out_pointer = std::bit_cast<std::uintptr_t>(task.address(b.at));
  entry.module_name = module.name;
  return entry;
}

}  // namespace

std::vector<TaskLayerModuleConfig> task_entries(const TaskPages& task,
                                                const LoraModelConfig& config) {
  std::vector<TaskLayerModuleConfig> entries;
  for (const Block& block : task.layout->blocks()) {
    const LoraModule& module = config.module(task.layout->rows()[block.row].module);
    for (const Part& a : task.layout->a_parts(block)) {
      for (const Part& b : task.layout->b_parts(block)) {
        entries.push_back(make_entry(task, module, block, a, b));
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

}  // namespace pagedlora
