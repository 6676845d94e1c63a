#include "pagedlora/layout.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "internal/first_fit.h"
#include "pagedlora/errors.h"

namespace pagedlora {

LayoutParams checked(LayoutParams params) {
  if (params.element_bytes != 2 && params.element_bytes != 4) {
    throw InvalidArgumentError("weights of " + std::to_string(params.element_bytes) +
                               " bytes each; 2 and 4 are possible");
  }
  if (params.page_bytes == 0 || params.page_bytes % kSlotBytes != 0) {
    throw InvalidArgumentError("a page of " + std::to_string(params.page_bytes) +
                               " bytes is not a multiple of the slot of " +
                               std::to_string(kSlotBytes) + " bytes; change page_size");
  }
  if (params.max_part_bytes == 0) {
    params.max_part_bytes = params.page_bytes;
  }
  const std::size_t one_feature = kMaxBlockRanks * params.element_bytes;
  if (params.max_part_bytes > params.page_bytes || params.max_part_bytes < one_feature) {
    throw InvalidArgumentError("max_part_bytes is " + std::to_string(params.max_part_bytes) +
                               "; it must hold one feature of a block (" +
                               std::to_string(one_feature) + " bytes) and fit a page of " +
                               std::to_string(params.page_bytes) + " bytes");
  }
  return params;
}

FeatureRange resolved(FeatureRange range, std::int64_t features) {
  const auto all = static_cast<std::uint32_t>(features);
  if (range.offset >= all || range.length > all - range.offset) {
    throw InvalidArgumentError("a slice of " + std::to_string(range.length) + " features from " +
                               std::to_string(range.offset) + " on is not in a module of " +
                               std::to_string(all));
  }
  return {range.offset, range.length == 0 ? all - range.offset : range.length};
}

void check_slices(const LoraModelConfig& config, std::span<const RowShape> rows) {
  std::size_t first = 0;  // of the module's rows
  for (std::size_t i = 1; i < rows.size(); ++i) {
    first = rows[i].module == rows[first].module ? first : i;
    for (std::size_t j = first; j < i; ++j) {
      const bool scales_outputs = rows[i].has_dora_scale || rows[j].has_dora_scale;
      if (rows[i].out.overlaps(rows[j].out) &&
          (scales_outputs || rows[i].in.overlaps(rows[j].in))) {
        throw InvalidArgumentError("module " + config.module(rows[i].module).name +
                                   " has two rows in one adapter for the same inputs and outputs");
      }
    }
  }
}

namespace {

void check_rows(const LoraModelConfig& config, const std::vector<RowShape>& rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].module.value >= config.modules().size()) {
      throw InvalidArgumentError("row " + std::to_string(i) + " names module " +
                                 std::to_string(rows[i].module.value) + " of " +
                                 std::to_string(config.modules().size()));
    }
    if (rows[i].rank < 1 || rows[i].rank > LoraModelConfig::kMaxRank) {
      throw InvalidArgumentError("row " + std::to_string(i) + " has rank " +
                                 std::to_string(rows[i].rank));
    }
    if (i > 0 && rows[i].module < rows[i - 1].module) {
      throw InvalidArgumentError("rows must name modules in ascending order");
    }
  }
  check_slices(config, rows);
}

void resolve_slices(const LoraModelConfig& config, std::vector<RowShape>& rows) {
  for (RowShape& row : rows) {
    if (row.module.value < config.modules().size()) {  // others are refused by check_rows
      const LoraModule& module = config.module(row.module);
      row.in = resolved(row.in, module.in_features);
      row.out = resolved(row.out, module.out_features);
      row.kind = module.kind;
    }
  }
}

// Of every module the position of its first row, and then the number of rows.
std::vector<std::uint32_t> index_rows(std::size_t num_modules, const std::vector<RowShape>& rows) {
  std::vector<std::uint32_t> first(num_modules + 1, 0);
  for (const RowShape& row : rows) {
    ++first[row.module.value + 1];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  return first;
}

// Cuts features of so many bytes each into tiles and places each.
std::uint32_t place_parts(std::uint32_t features, std::size_t feature_bytes,
                          const LayoutParams& params, internal::FirstFit& pages,
                          std::vector<Part>& parts) {
  const std::size_t tile = params.max_part_bytes / feature_bytes;
  std::uint32_t count = 0;
  for (std::size_t begin = 0; begin < features; begin += tile, ++count) {
    const std::size_t length = std::min<std::size_t>(tile, features - begin);
    const std::size_t slots = (length * feature_bytes + kSlotBytes - 1) / kSlotBytes;
    parts.push_back({static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(length),
                     pages.place(slots)});
  }
  return count;
}

}  // namespace

Layout::Layout(const LoraModelConfig& config, std::vector<RowShape> rows,
               const LayoutParams& params)
    : rows_(std::move(rows)), params_(checked(params)) {
  resolve_slices(config, rows_);
  check_rows(config, rows_);
  first_row_of_module_ = index_rows(config.modules().size(), rows_);
  internal::FirstFit pages(params_.page_bytes / kSlotBytes);
  for (std::uint32_t row = 0; row < rows_.size(); ++row) {
    const std::uint32_t in = rows_[row].in.length;
    const std::uint32_t out = rows_[row].out.length;
    first_block_of_row_.push_back(static_cast<std::uint32_t>(blocks_.size()));
    for (std::uint32_t begin = 0; begin < rows_[row].rank; begin += kMaxBlockRanks) {
      Block block;
      block.row = row;
      block.rank_begin = static_cast<std::uint16_t>(begin);
      block.rank_count =
          static_cast<std::uint16_t>(std::min(kMaxBlockRanks, rows_[row].rank - begin));
      block.first_part = static_cast<std::uint32_t>(parts_.size());
      const std::size_t feature_bytes = block.rank_count * params_.element_bytes;
      block.num_a_parts = place_parts(in, feature_bytes, params_, pages, parts_);
      block.num_b_parts = place_parts(out, feature_bytes, params_, pages, parts_);
      blocks_.push_back(block);
    }
    payload_bytes_ +=
        std::size_t{rows_[row].rank} * (std::size_t{in} + out) * params_.element_bytes;
    place_vectors(row, pages);
  }
  first_block_of_row_.push_back(static_cast<std::uint32_t>(blocks_.size()));
  num_pages_ = pages.num_pages();
  blocks_.shrink_to_fit();
  parts_.shrink_to_fit();
}

void Layout::place_vectors(std::uint32_t row, internal::FirstFit& pages) {
  const RowShape& shape = rows_[row];
  if (!shape.has_bias && !shape.has_dora_scale) {
    return;
  }
  vectors_of_row_.resize(rows_.size());
  VectorParts& vectors = vectors_of_row_[row];
  vectors.first = static_cast<std::uint32_t>(parts_.size());
  const auto place = [&](bool is_there, std::uint32_t& num_parts) {
    if (is_there) {
      num_parts = place_parts(shape.out.length, sizeof(float), params_, pages, parts_);
      payload_bytes_ += std::size_t{shape.out.length} * sizeof(float);
    }
  };
  place(shape.has_bias, vectors.num_bias);
  place(shape.has_dora_scale, vectors.num_dora_scale);
  has_dora_scales_ |= shape.has_dora_scale;
}

std::span<const Block> Layout::blocks_of_row(std::uint32_t row) const {
  const std::uint32_t begin = first_block_of_row_[row];
  return std::span(blocks_).subspan(begin, first_block_of_row_[row + 1] - begin);
}

std::span<const Part> Layout::a_parts(const Block& block) const {
  return std::span(parts_).subspan(block.first_part, block.num_a_parts);
}

std::span<const Part> Layout::b_parts(const Block& block) const {
  return std::span(parts_).subspan(block.first_part + block.num_a_parts, block.num_b_parts);
}

std::span<const Part> Layout::bias_parts(std::uint32_t row) const {
  if (vectors_of_row_.empty()) {
    return {};
  }
  const VectorParts& vectors = vectors_of_row_[row];
  return std::span(parts_).subspan(vectors.first, vectors.num_bias);
}

std::span<const Part> Layout::dora_scale_parts(std::uint32_t row) const {
  if (vectors_of_row_.empty()) {
    return {};
  }
  const VectorParts& vectors = vectors_of_row_[row];
  return std::span(parts_).subspan(vectors.first + vectors.num_bias, vectors.num_dora_scale);
}

std::size_t Layout::memory_bytes() const {
  return sizeof(Layout) + rows_.capacity() * sizeof(RowShape) + blocks_.capacity() * sizeof(Block) +
         first_block_of_row_.capacity() * sizeof(std::uint32_t) + parts_.capacity() * sizeof(Part) +
         first_row_of_module_.capacity() * sizeof(std::uint32_t) +
         vectors_of_row_.capacity() * sizeof(VectorParts);
}

}  // namespace pagedlora
