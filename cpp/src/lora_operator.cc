#include "pagedlora/lora_operator.h"

#include <algorithm>
#include <limits>
#include <string>

#include "internal/lora_call_check.h"
#include "internal/lora_combine.h"
#include "internal/lora_kernels.h"
#include "internal/lora_lookup.h"
#include "internal/read_ahead.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::kRankLanes;
using internal::kTileRows;
using internal::ReadAhead;
using internal::WeightsPart;

static_assert(kRankLanes == kMaxBlockRanks);

// Memory is asked for weights while it still has to deliver so many before them.
constexpr std::size_t kReadAheadBytes = 16384;

bool same_task(const TaskPages& a, const TaskPages& b) {
  return a.pages == b.pages && a.layout == b.layout && a.base == b.base;
}

const std::byte* element(const void* base, std::int64_t index, Dtype dtype) {
  return static_cast<const std::byte*>(base) +
         index * static_cast<std::int64_t>(element_bytes(dtype));
}

std::byte* element(void* base, std::int64_t index, Dtype dtype) {
  return static_cast<std::byte*>(base) + index * static_cast<std::int64_t>(element_bytes(dtype));
}

// Features [from, to) of a part of A (all of it) or B.
WeightsPart weights_part(const TaskPages& task, const Block& block, const Part& part,
                         std::uint32_t from, std::uint32_t to) {
  const std::int64_t skipped = std::int64_t{from - part.begin} * block.rank_count;
  return {.at = element(task.address(part.at), skipped, task.dtype),
          .bytes = std::size_t{to - from} * block.rank_count * element_bytes(task.dtype),
          .begin = from,
          .length = to - from,
          .rank_count = block.rank_count};
}

void add_a_parts(const TaskPages& task, std::span<const Block> blocks,
                 std::vector<WeightsPart>& into) {
  for (const Block& block : blocks) {
    for (const Part& part : task.layout->a_parts(block)) {
      into.push_back(weights_part(task, block, part, part.begin, part.begin + part.length));
    }
  }
}

const Part& part_with(std::span<const Part> parts, std::uint32_t feature) {
  return *std::ranges::find_if(
      parts, [&](const Part& part) { return feature < part.begin + part.length; });
}

// Cuts all blocks at the same output features, wherever a part of one of them begins.
void add_b_parts(const TaskPages& task, std::span<const Block> blocks,
                 std::vector<WeightsPart>& into) {
  const Layout& layout = *task.layout;
  const Part& last = layout.b_parts(blocks.front()).back();
  const std::uint32_t out_features = last.begin + last.length;
  for (std::uint32_t begin = 0; begin < out_features;) {
    std::uint32_t end = std::min(begin + internal::kMaxExpandLength, out_features);
    for (const Block& block : blocks) {
      const Part& part = part_with(layout.b_parts(block), begin);
      end = std::min(end, part.begin + part.length);
    }
    for (const Block& block : blocks) {
      const Part& part = part_with(layout.b_parts(block), begin);
      into.push_back(weights_part(task, block, part, begin, end));
    }
    begin = end;
  }
}

ReadAhead start_reading(std::span<const WeightsPart> parts) {
  ReadAhead ahead{parts.data(), parts.data() + parts.size(), 0};
  for (std::size_t bytes = 0; bytes < kReadAheadBytes; bytes += kSlotBytes) {
    internal::read_ahead(ahead, kSlotBytes);
  }
  return ahead;
}

}  // namespace

LoraBatch::LoraBatch(std::span<const Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.num_rows == 0) {
      continue;
    }
    if (segment.num_rows > std::numeric_limits<std::uint32_t>::max() - num_rows_) {
      throw InvalidArgumentError(
          "the segments of LoraBatch have more than 2^32 - 1 rows: a segment of " +
          std::to_string(segment.num_rows) + " follows " + std::to_string(num_rows_));
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
        touch_modules(*segment.task->layout);
      }
    }
    num_rows_ += segment.num_rows;
  }
}

void LoraBatch::touch_modules(const Layout& layout) {
  touched_modules_.resize(std::max<std::size_t>(touched_modules_.size(), layout.num_modules()));
  for (const RowShape& row : layout.rows()) {
    touched_modules_[row.module.value] = 1;
  }
}

bool LoraBatch::has_dora_scales() const {
  return std::ranges::any_of(runs_,
                             [](const Run& run) { return run.task.layout->has_dora_scales(); });
}

// A run and a row of its adapter for the module, and its weights in Scratch::parts: A of all
// blocks, one block after the other, then B, cut by add_b_parts.
struct LoraOperator::Work {
  const LoraBatch::Run* run = nullptr;
  std::uint32_t row = 0;
  std::size_t first_a = 0;
  std::size_t first_b = 0;
  std::size_t end = 0;
};

struct LoraOperator::Scratch {
  std::vector<WeightsPart> parts;
  std::vector<Work> works;
  std::vector<float> rank_space;  // scale * A x: [blocks of the row, rows of a tile, kRankLanes]
  struct {
    std::vector<float> output_space;  // scale * B A x: [rows of a tile, outputs of a part of B]
    std::vector<float> bias;          // of the same outputs
    std::vector<float> dora_scale;
  } vectors;
};

// One tile of rows of one run: what the two passes share.
struct LoraOperator::Tile {
  const TaskPages* task;
  std::uint32_t row;  // of the layout
  std::span<const Block> blocks;
  std::span<const WeightsPart> a;
  std::span<const WeightsPart> b;
  float scale;
  const std::int64_t* token_ids;  // null: x is there
  float factor;
  const void* x;
  void* y;
  const void* base_bias;
  std::int64_t x_row_stride;
  std::int64_t y_row_stride;
  std::uint32_t num_rows;
  ReadAhead* ahead;
};

LoraOperator::LoraOperator(Dtype weights_dtype, Isa isa)
    : weights_dtype_(weights_dtype), isa_(isa), scratch_(std::make_unique<Scratch>()) {
  if (isa > best_isa()) {
    throw InvalidArgumentError("this processor or build cannot run the instruction set " +
                               std::string(isa_name(isa)) + "; use best_isa()");
  }
}

LoraOperator::LoraOperator(LoraOperator&&) noexcept = default;
LoraOperator& LoraOperator::operator=(LoraOperator&&) noexcept = default;
LoraOperator::~LoraOperator() = default;

// Either kind of call.
struct LoraOperator::Call {
  Activations activations;
  ModuleKind kind = ModuleKind::linear;
  const std::int64_t* token_ids = nullptr;  // of an embedding, instead of x
  float factor = 1.0F;
};

void LoraOperator::apply(const LoraBatch& batch, ModuleIndex module,
                         const Activations& activations) {
  apply(batch, module, Call{.activations = activations});
}

void LoraOperator::apply_embedding(const LoraBatch& batch, ModuleIndex module,
                                   const EmbeddingActivations& activations) {
  apply(batch, module,
        Call{.activations = {.y = activations.y,
                             .y_row_stride = activations.y_row_stride,
                             .num_rows = activations.num_rows,
                             .dtype = activations.dtype},
             .kind = ModuleKind::embedding,
             .token_ids = activations.token_ids,
             .factor = activations.factor});
}

void LoraOperator::apply(const LoraBatch& batch, ModuleIndex module, const Call& call) {
  const bool is_linear = call.kind == ModuleKind::linear;
  internal::check_call({.batch = batch,
                        .module = module,
                        .kind = call.kind,
                        .weights_dtype = weights_dtype_,
                        .activations = call.activations,
                        .input = is_linear ? call.activations.x : call.token_ids});
  find_work(batch, module, call.kind);
  const internal::LoraKernels& kernels =
      internal::lora_kernels(call.activations.dtype, weights_dtype_, isa_);
  ReadAhead ahead = start_reading(scratch_->parts);
  for (const Work& work : scratch_->works) {
    apply_run(kernels, work, call, ahead);
  }
}

void LoraOperator::find_work(const LoraBatch& batch, ModuleIndex module, ModuleKind kind) {
  std::vector<WeightsPart>& parts = scratch_->parts;
  std::vector<Work>& works = scratch_->works;
  parts.clear();
  works.clear();
  for (const LoraBatch::Run& run : batch.runs()) {
    const auto [first_row, end_row] = run.task.layout->rows_of(module);
    for (std::uint32_t row = first_row; row < end_row; ++row) {
      const std::span<const Block> blocks = run.task.layout->blocks_of_row(row);
      Work& work = works.emplace_back(Work{.run = &run, .row = row, .first_a = parts.size()});
      if (kind == ModuleKind::linear) {
        add_a_parts(run.task, blocks, parts);
      }
      work.first_b = parts.size();
      add_b_parts(run.task, blocks, parts);
      work.end = parts.size();
    }
  }
}

void LoraOperator::apply_run(const internal::LoraKernels& kernels, const Work& work,
                             const Call& call, ReadAhead& ahead) {
  const Activations& activations = call.activations;
  const Dtype dtype = activations.dtype;
  const LoraBatch::Run& run = *work.run;
  const RowShape& shape = run.task.layout->rows()[work.row];
  const WeightsPart* parts = scratch_->parts.data();
  ReadAhead nothing;  // the caches hold the weights after the first tile
  for (std::uint32_t done = 0; done < run.num_rows; done += kTileRows) {
    const std::int64_t first = static_cast<std::int64_t>(run.first_row) + done;
    const Tile tile{
        .task = &run.task,
        .row = work.row,
        .blocks = run.task.layout->blocks_of_row(work.row),
        .a = {parts + work.first_a, parts + work.first_b},
        .b = {parts + work.first_b, parts + work.end},
        .scale = run.task.scales[work.row],
        .token_ids = call.token_ids == nullptr ? nullptr : call.token_ids + first,
        .factor = call.factor,
        .x = element(activations.x, first * activations.x_row_stride + shape.in.offset, dtype),
        .y = element(activations.y, first * activations.y_row_stride + shape.out.offset, dtype),
        .base_bias = activations.base_bias == nullptr
                         ? nullptr
                         : element(activations.base_bias, shape.out.offset, dtype),
        .x_row_stride = activations.x_row_stride,
        .y_row_stride = activations.y_row_stride,
        .num_rows = std::min(kTileRows, run.num_rows - done),
        .ahead = done == 0 ? &ahead : &nothing};
    if (tile.token_ids == nullptr) {
      shrink(kernels, *run.task.layout, tile);
    } else {
      look_up(tile);
    }
    if (shape.has_bias || shape.has_dora_scale) {
      expand_with_vectors(dtype, tile);
    } else {
      expand(kernels, dtype, tile);
    }
  }
}

void LoraOperator::shrink(const internal::LoraKernels& kernels, const Layout& layout,
                          const Tile& tile) {
  const std::size_t floats_per_block = std::size_t{tile.num_rows} * kRankLanes;
  std::vector<float>& t = scratch_->rank_space;
  t.assign(tile.blocks.size() * floats_per_block, 0.0F);
  const WeightsPart* parts = tile.a.data();
  for (std::size_t block = 0; block < tile.blocks.size(); ++block) {
    const auto num_parts = static_cast<std::uint32_t>(layout.a_parts(tile.blocks[block]).size());
    kernels.shrink({.x = tile.x,
                    .x_row_stride = tile.x_row_stride,
                    .num_rows = tile.num_rows,
                    .parts = parts,
                    .num_parts = num_parts,
                    .t = t.data() + block * floats_per_block,
                    .ahead = tile.ahead});
    parts += num_parts;
  }
  for (float& value : t) {
    value *= tile.scale;
  }
}

// What shrink gives, for tokens: their columns of A.
void LoraOperator::look_up(const Tile& tile) {
  const std::size_t floats_per_block = std::size_t{tile.num_rows} * kRankLanes;
  std::vector<float>& t = scratch_->rank_space;
  t.assign(tile.blocks.size() * floats_per_block, 0.0F);
  for (std::size_t block = 0; block < tile.blocks.size(); ++block) {
    internal::look_up({.task = tile.task,
                       .block = &tile.blocks[block],
                       .token_ids = tile.token_ids,
                       .num_rows = tile.num_rows,
                       .vocabulary = tile.task->layout->rows()[tile.row].in,
                       .t = t.data() + block * floats_per_block});
  }
  for (float& value : t) {
    value *= tile.scale * tile.factor;
  }
}

void LoraOperator::expand(const internal::LoraKernels& kernels, Dtype dtype, const Tile& tile) {
  for (std::size_t done = 0; done < tile.b.size(); done += tile.blocks.size()) {
    const WeightsPart& first = tile.b[done];
    kernels.expand({.t = scratch_->rank_space.data(),
                    .num_rows = tile.num_rows,
                    .blocks = &first,
                    .num_blocks = static_cast<std::uint32_t>(tile.blocks.size()),
                    .length = first.length,
                    .y = element(tile.y, first.begin, dtype),
                    .y_row_stride = tile.y_row_stride,
                    .ahead = tile.ahead});
  }
}

// B A x of some outputs first, in float32, so that y is rounded once.
void LoraOperator::expand_with_vectors(Dtype dtype, const Tile& tile) {
  const internal::LoraKernels& kernels =
      internal::lora_kernels(Dtype::float32, weights_dtype_, isa_);
  const Layout& layout = *tile.task->layout;
  auto& [output_space, bias, dora_scale] = scratch_->vectors;
  for (std::size_t done = 0; done < tile.b.size(); done += tile.blocks.size()) {
    const WeightsPart& first = tile.b[done];
    output_space.assign(std::size_t{tile.num_rows} * first.length, 0.0F);
    kernels.expand({.t = scratch_->rank_space.data(),
                    .num_rows = tile.num_rows,
                    .blocks = &first,
                    .num_blocks = static_cast<std::uint32_t>(tile.blocks.size()),
                    .length = first.length,
                    .y = output_space.data(),
                    .y_row_stride = first.length,
                    .ahead = tile.ahead});
    const auto vector_of = [&](std::span<const Part> parts, std::vector<float>& into) -> float* {
      if (parts.empty()) {
        return nullptr;
      }
      into.resize(first.length);
      internal::copy_features(*tile.task, parts, first.begin, first.length, into.data());
      return into.data();
    };
    float* scaled_bias = vector_of(layout.bias_parts(tile.row), bias);
    if (scaled_bias != nullptr) {
      std::ranges::transform(bias, scaled_bias, [&](float value) { return value * tile.scale; });
    }
    internal::combine(
        {.scaled_product = output_space.data(),
         .num_rows = tile.num_rows,
         .length = first.length,
         .scaled_bias = scaled_bias,
         .dora_scale = vector_of(layout.dora_scale_parts(tile.row), dora_scale),
         .base_bias =
             tile.base_bias == nullptr ? nullptr : element(tile.base_bias, first.begin, dtype),
         .y = element(tile.y, first.begin, dtype),
         .y_row_stride = tile.y_row_stride},
        dtype);
  }
}

}  // namespace pagedlora
