// What the LoRA kernels read to find their weights: records in one buffer of fixed size.
//
//     header | tiles, order   of the batch: rewritten every step, in one piece
//     tasks                   one per slot, written when a task becomes resident
//     layouts                 modules, rows, blocks and parts of each: written once per layout
//     residencies             page ids and scales of each task: written once per residency
//
// The batch's tokens are put in an order in which those of one task are neighbours, and cut into
// tiles of one task. What a token's numbers are does not depend on the tiles.
//
// All offsets are in bytes from the beginning of the buffer. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/dtype.h"
#include "pagedlora/layout.h"

namespace pagedlora::cuda {

struct LoraHeader {
  std::uint32_t num_tiles;   // kernels stop here, however large the grid is
  std::uint32_t num_tokens;  // with an adapter
  std::uint32_t order;       // offset of num_tokens positions in x and y
  std::uint32_t unused;
};

struct LoraTile {
  std::uint32_t task;   // its slot
  std::uint32_t first;  // in the order
  std::uint32_t num_tokens;
  std::uint32_t unused;
};

struct LoraTaskEntry {
  const std::byte* pool;  // address of page 0
  std::uint64_t page_bytes;
  std::uint32_t num_modules;
  std::uint32_t modules;  // offsets of arrays of the records below
  std::uint32_t rows;
  std::uint32_t blocks;
  std::uint32_t parts;
  std::uint32_t pages;   // of 32-bit page ids
  std::uint32_t scales;  // of floats, one per row
  std::uint32_t unused;
};

// Blocks of a module lie together, in the order of its rows.
struct LoraModuleEntry {
  std::uint32_t first_row;
  std::uint32_t num_rows;
  std::uint32_t first_block;
  std::uint32_t num_blocks;
};

struct LoraRowEntry {
  FeatureRange in;
  FeatureRange out;
  std::uint32_t first_block;
  std::uint32_t num_blocks;
  std::uint32_t bias;  // first part
  std::uint32_t num_bias_parts;
  std::uint32_t dora_scale;
  std::uint32_t num_dora_scale_parts;
};

struct LoraBlockEntry {
  std::uint32_t row;
  std::uint32_t rank_count;
  std::uint32_t a;  // first part
  std::uint32_t num_a_parts;
  std::uint32_t b;
  std::uint32_t num_b_parts;
  std::uint32_t b_tile;  // outputs of each part of B but the last
  std::uint32_t a_tile;
};

// What a kernel is given: where the buffer is, and what in it never moves.
struct LoraTablesView {
  const std::byte* base = nullptr;
  std::uint32_t tasks = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t max_blocks = 0;  // of one module of one task
  Dtype weights = Dtype::float32;
};

}  // namespace pagedlora::cuda
