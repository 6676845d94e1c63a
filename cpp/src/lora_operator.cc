#include "pagedlora/lora_operator.h"

#include <algorithm>
#include <string>

#include "internal/lora_kernels.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::kRankLanes;
using internal::kTileRows;

static_assert(kRankLanes == kMaxBlockRanks);

// Output features handled between two passes over the blocks: what keeps the accumulators of a
// tile in the second-level cache. Does not affect results.
constexpr std::uint32_t kOutChunk = 2048;

bool same_task(const TaskPages& a, const TaskPages& b) {
  return a.pages == b.pages && a.layout == b.layout && a.base == b.base;
}

const std::byte* element(const void* base, std::int64_t index, Dtype dtype) {
  return static_cast<const std::byte*>(base) +
         index * static_cast<std::int64_t>(element_bytes(dtype));
}

using PartsOf = std::span<const Part> (Layout::*)(const Block&) const;

// The part after blocks[block]'s part `part` in the order of a pass, or `otherwise` after the last.
const std::byte* part_after(const TaskPages& task, std::span<const Block> blocks, std::size_t block,
                            std::size_t part, PartsOf parts_of, const std::byte* otherwise) {
  const std::span<const Part> parts = (task.layout->*parts_of)(blocks[block]);
  if (part + 1 < parts.size()) {
    return task.address(parts[part + 1].at);
  }
  if (block + 1 < blocks.size()) {
    return task.address((task.layout->*parts_of)(blocks[block + 1]).front().at);
  }
  return otherwise;
}

std::byte* element(void* base, std::int64_t index, Dtype dtype) {
  return static_cast<std::byte*>(base) + index * static_cast<std::int64_t>(element_bytes(dtype));
}

std::size_t first_touching(std::span<const LoraBatch::Run> runs, std::size_t from,
                           ModuleIndex module) {
  while (from < runs.size() && !runs[from].task.layout->row_of(module)) {
    ++from;
  }
  return from;
}

const std::byte* first_weights(const TaskPages& task, ModuleIndex module) {
  const Layout& layout = *task.layout;
  const Block& block = layout.blocks_of_row(*layout.row_of(module)).front();
  return task.address(layout.a_parts(block).front().at);
}

}  // namespace

LoraBatch::LoraBatch(std::span<const Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.num_rows == 0) {
      continue;
    }
    if (segment.task) {
      if (segment.task->layout == nullptr) {
        throw InvalidArgumentError("a segment of LoraBatch names a task without a layout");
      }
      const bool continues = !runs_.empty() && same_task(runs_.back().task, *segment.task) &&
                             runs_.back().first_row + runs_.back().num_rows == num_rows_;
      if (continues) {
        runs_.back().num_rows += segment.num_rows;
      } else {
        runs_.push_back({*segment.task, num_rows_, segment.num_rows});
      }
    }
    num_rows_ += segment.num_rows;
  }
}

// One tile of rows of one run: what the two passes share.
struct LoraOperator::Tile {
  const TaskPages& task;
  std::span<const Block> blocks;
  float scale;
  const void* x;
  void* y;
  std::int64_t x_row_stride;
  std::int64_t y_row_stride;
  std::uint32_t num_rows;
  const std::byte* next_weights;  // read after this tile's, if any: a hint
};

LoraOperator::LoraOperator(Dtype weights_dtype, Isa isa)
    : weights_dtype_(weights_dtype), isa_(isa) {
  if (isa > best_isa()) {
    throw InvalidArgumentError("this processor or build cannot run the instruction set " +
                               std::string(isa_name(isa)) + "; use best_isa()");
  }
}

void LoraOperator::apply(const LoraBatch& batch, ModuleIndex module,
                         const Activations& activations) {
  check(batch, module, activations);
  const internal::LoraKernels& kernels =
      internal::lora_kernels(activations.dtype, weights_dtype_, isa_);
  const std::span<const LoraBatch::Run> runs = batch.runs();
  std::size_t next = first_touching(runs, 0, module);
  while (next < runs.size()) {
    const LoraBatch::Run& run = runs[next];
    next = first_touching(runs, next + 1, module);
    const std::byte* next_weights =
        next < runs.size() ? first_weights(runs[next].task, module) : nullptr;
    apply_run(kernels, run, module, activations, next_weights);
  }
}

void LoraOperator::apply_run(const internal::LoraKernels& kernels, const LoraBatch::Run& run,
                             ModuleIndex module, const Activations& activations,
                             const std::byte* next_weights) {
  const Dtype dtype = activations.dtype;
  const std::uint32_t row = *run.task.layout->row_of(module);
  for (std::uint32_t done = 0; done < run.num_rows; done += kTileRows) {
    const std::int64_t first = static_cast<std::int64_t>(run.first_row) + done;
    apply_tile(kernels, dtype,
               {.task = run.task,
                .blocks = run.task.layout->blocks_of_row(row),
                .scale = run.task.scales[row],
                .x = element(activations.x, first * activations.x_row_stride, dtype),
                .y = element(activations.y, first * activations.y_row_stride, dtype),
                .x_row_stride = activations.x_row_stride,
                .y_row_stride = activations.y_row_stride,
                .num_rows = std::min(kTileRows, run.num_rows - done),
                .next_weights = next_weights});
  }
}

void LoraOperator::check(const LoraBatch& batch, ModuleIndex module,
                         const Activations& activations) const {
  if (activations.num_rows != batch.num_rows()) {
    throw InvalidArgumentError("activations have " + std::to_string(activations.num_rows) +
                               " rows, the batch has " + std::to_string(batch.num_rows()));
  }
  for (const LoraBatch::Run& run : batch.runs()) {
    if (run.task.dtype != weights_dtype_) {
      throw InvalidArgumentError("pages of " + std::string(dtype_name(run.task.dtype)) +
                                 " given to a LoraOperator for " +
                                 std::string(dtype_name(weights_dtype_)));
    }
    if (module.value >= run.task.layout->num_modules()) {
      throw InvalidArgumentError("module index " + std::to_string(module.value) +
                                 " given for a model with " +
                                 std::to_string(run.task.layout->num_modules()) + " LoRA modules");
    }
  }
}

void LoraOperator::apply_tile(const internal::LoraKernels& kernels, Dtype dtype, const Tile& tile) {
  shrink(kernels, dtype, tile);
  const Layout& layout = *tile.task.layout;
  const Part& last = layout.b_parts(tile.blocks.front()).back();
  const std::uint32_t out_features = last.begin + last.length;
  for (std::uint32_t begin = 0; begin < out_features; begin += kOutChunk) {
    const std::uint32_t length = std::min(kOutChunk, out_features - begin);
    expand(kernels, tile, begin, length);
    kernels.add({.acc = out_space_.data(),
                 .acc_row_stride = length,
                 .y = element(tile.y, begin, dtype),
                 .y_row_stride = tile.y_row_stride,
                 .num_rows = tile.num_rows,
                 .length = length});
  }
}

void LoraOperator::shrink(const internal::LoraKernels& kernels, Dtype dtype, const Tile& tile) {
  const Layout& layout = *tile.task.layout;
  const std::size_t floats_per_block = std::size_t{tile.num_rows} * kRankLanes;
  rank_space_.assign(tile.blocks.size() * floats_per_block, 0.0F);
  const std::byte* first_b = tile.task.address(layout.b_parts(tile.blocks.front()).front().at);
  for (std::size_t block = 0; block < tile.blocks.size(); ++block) {
    const std::span<const Part> parts = layout.a_parts(tile.blocks[block]);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      kernels.shrink({.x = element(tile.x, parts[part].begin, dtype),
                      .x_row_stride = tile.x_row_stride,
                      .num_rows = tile.num_rows,
                      .a = tile.task.address(parts[part].at),
                      .length = parts[part].length,
                      .rank_count = tile.blocks[block].rank_count,
                      .t = rank_space_.data() + block * floats_per_block,
                      .read_next = part_after(tile.task, tile.blocks, block, part, &Layout::a_parts,
                                              first_b)});
    }
  }
  for (float& value : rank_space_) {
    value *= tile.scale;
  }
}

// out_space_ = the sum over blocks of B t, for output features [begin, begin + length).
void LoraOperator::expand(const internal::LoraKernels& kernels, const Tile& tile,
                          std::uint32_t begin, std::uint32_t length) {
  const Layout& layout = *tile.task.layout;
  out_space_.assign(std::size_t{tile.num_rows} * length, 0.0F);
  for (std::size_t block = 0; block < tile.blocks.size(); ++block) {
    const std::uint32_t ranks = tile.blocks[block].rank_count;
    const std::span<const Part> parts = layout.b_parts(tile.blocks[block]);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      const std::uint32_t from = std::max(begin, part.begin);
      const std::uint32_t to = std::min(begin + length, part.begin + part.length);
      if (from >= to) {
        continue;
      }
      const std::int64_t skipped = std::int64_t{from - part.begin} * ranks;
      const void* b = tile.task.address(part.at);
      kernels.expand({.t = rank_space_.data() + block * tile.num_rows * kRankLanes,
                      .num_rows = tile.num_rows,
                      .b = element(b, skipped, weights_dtype_),
                      .length = to - from,
                      .rank_count = ranks,
                      .acc = out_space_.data() + (from - begin),
                      .acc_row_stride = length,
                      .read_next = part_after(tile.task, tile.blocks, block, i, &Layout::b_parts,
                                              tile.next_weights)});
    }
  }
}

}  // namespace pagedlora
