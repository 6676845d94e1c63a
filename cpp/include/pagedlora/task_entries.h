// A resident task seen from outside: the entries that kernels of other engines read, and its
// matrices put together again.
//
// Pure functions over pages that the caller keeps in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"

namespace pagedlora {

// One A part and one B part of one block. Entries of one module add up:
//   y[out_offset : out_offset + out_size] += scale * B (A x[in_offset : in_offset + in_size])
// with A [adapter_size, in_size] at weights_in_pointer and B [out_size, adapter_size] at
// weights_out_pointer, row-major. A block whose parts are tiled gives one entry per pair of tiles.
//
// A of an embedding lies as [in_size, adapter_size], and x are its tokens: A[x - in_offset, :].
//
// A row with a DoRA scale or a bias has, for the same outputs, float32 vectors [out_size] at
// scaling_vec_pointer and bias_pointer: see PlannedRow for what they mean. Every entry of the row
// names those of its outputs; they count once per output, not once per entry. A part of B that
// reaches over the end of a tile of the vectors gives an entry for each; out_slot_idx is then that
// of the part.
struct TaskLayerModuleConfig {
  std::uint32_t page_id = 0;      // of A, in the tier's pool
  std::uint32_t slot_idx = 0;     // of A, in units of kSlotBytes
  std::uint32_t out_page_id = 0;  // of B
  std::uint32_t out_slot_idx = 0;
  std::uint32_t in_offset = 0;  // features
  std::uint32_t in_size = 0;
  std::uint32_t out_offset = 0;
  std::uint32_t out_size = 0;
  std::int32_t module_id = -1;
  std::int32_t layer_id = -1;
  std::uint32_t adapter_size = 0;  // ranks of the block
  std::uint32_t num_slots = 0;     // of A and B together
  float scale = 1.0F;
  std::uint64_t weights_in_pointer = 0;
  std::uint64_t weights_out_pointer = 0;
  std::uint64_t scaling_vec_pointer = 0;  // 0: no DoRA scale
  std::uint64_t bias_pointer = 0;         // 0: no bias
  std::string module_name;
};

std::vector<TaskLayerModuleConfig> task_entries(const TaskPages& task,
                                                const LoraModelConfig& config);

// Puts the row's A [rank, in.length] and B [out.length, rank] together from their parts.
void gather_row(const TaskPages& task, std::uint32_t row, std::byte* a, std::byte* b);

// Puts a vector [out.length] together from its parts: those of a bias or of a DoRA scale.
void gather_vector(const TaskPages& task, std::span<const Part> parts, float* into);

}  // namespace pagedlora
