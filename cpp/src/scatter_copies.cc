// Which rectangles of a stored matrix go to which parts: one list for every executor.
#include <algorithm>

#include "pagedlora/scatter_plan.h"

namespace pagedlora {
namespace {

// Rows of a B matrix that stay in the L1 cache while every block takes its columns.
constexpr std::size_t kTileBytes = 32U << 10;

// `rows` by `columns` elements from `at` to the place that starts `element` elements into the part.
ScatterCopy copy_of(const ScatterCopy& common, std::size_t at, const Part& part,
                    std::size_t element, std::uint32_t rows, std::uint32_t columns) {
  ScatterCopy copy = common;
  copy.at = at;
  copy.part = part.at;
  copy.offset_bytes = element * element_bytes(common.target_dtype);
  copy.rows = rows;
  copy.columns = columns;
  return copy;
}

}  // namespace

void ScatterPlan::list(const Segment& segment, Dtype cache_dtype,
                       std::vector<ScatterCopy>& copies) const {
  const Matrix& matrix = *segment.matrix;
  const bool is_vector = matrix.kind == Kind::bias || matrix.kind == Kind::dora_scale;
  ScatterCopy common;
  common.source_stride_bytes = matrix.stride_bytes;
  common.matrix = index_of(matrix);
  common.source_dtype = matrix.dtype;
  common.target_dtype = is_vector ? Dtype::float32 : cache_dtype;
  if (is_vector) {
    list_vector(segment, common, copies);
  } else if (matrix.kind == Kind::b) {
    list_b(segment, common, copies);
  } else if (layout_.rows()[matrix.row].kind == ModuleKind::embedding) {
    list_transposed_a(segment, common, copies);
  } else {
    list_a(segment, common, copies);
  }
}

void ScatterPlan::list_a(const Segment& segment, const ScatterCopy& common,
                         std::vector<ScatterCopy>& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::size_t stride = matrix.stride_bytes;
  const std::uint32_t row_end = segment.row_begin + segment.num_rows;
  const std::uint32_t column_end = segment.column_begin + segment.num_columns;
  const std::span<const Block> blocks = layout_.blocks_of_row(matrix.row);
  for (std::uint32_t row = segment.row_begin; row < row_end;) {
    const Block& block = blocks[row / kMaxBlockRanks];
    const std::uint32_t block_end = block.rank_begin + block.rank_count;
    const std::uint32_t rows = std::min(row_end, block_end) - row;
    for (const Part& part : layout_.a_parts(block)) {
      const std::uint32_t begin = std::max(part.begin, segment.column_begin);
      const std::uint32_t end = std::min(part.begin + part.length, column_end);
      if (begin < end) {
        copies.push_back(
            copy_of(common,
                    segment.at + (row - segment.row_begin) * stride +
                        (begin - segment.column_begin) * element,
                    part, std::size_t{row - block.rank_begin} * part.length + (begin - part.begin),
                    rows, end - begin));
      }
    }
    row += rows;
  }
}

// Of an embedding: its parts are [features, ranks of the block].
void ScatterPlan::list_transposed_a(const Segment& segment, const ScatterCopy& common,
                                    std::vector<ScatterCopy>& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::uint32_t row_end = segment.row_begin + segment.num_rows;
  const std::uint32_t column_end = segment.column_begin + segment.num_columns;
  for (const Block& block : layout_.blocks_of_row(matrix.row)) {
    const std::uint32_t first = std::max<std::uint32_t>(block.rank_begin, segment.row_begin);
    const std::uint32_t last =
        std::min<std::uint32_t>(block.rank_begin + block.rank_count, row_end);
    for (const Part& part : layout_.a_parts(block)) {
      const std::uint32_t begin = std::max(part.begin, segment.column_begin);
      const std::uint32_t end = std::min(part.begin + part.length, column_end);
      if (first < last && begin < end) {
        copies.push_back(copy_of(
            common,
            segment.at + (first - segment.row_begin) * matrix.stride_bytes +
                (begin - segment.column_begin) * element,
            part, std::size_t{begin - part.begin} * block.rank_count + (first - block.rank_begin),
            last - first, end - begin));
        copies.back().target_stride = block.rank_count;
      }
    }
  }
}

void ScatterPlan::list_b(const Segment& segment, const ScatterCopy& common,
                         std::vector<ScatterCopy>& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::size_t stride = matrix.stride_bytes;
  const std::uint32_t row_end = segment.row_begin + segment.num_rows;
  const auto step = static_cast<std::uint32_t>(std::max<std::size_t>(kTileBytes / stride, 1));
  for (std::uint32_t tile = segment.row_begin; tile < row_end; tile += step) {
    const std::uint32_t tile_end = std::min(tile + step, row_end);
    for (const Block& block : layout_.blocks_of_row(matrix.row)) {
      for (const Part& part : layout_.b_parts(block)) {
        const std::uint32_t begin = std::max(part.begin, tile);
        const std::uint32_t end = std::min(part.begin + part.length, tile_end);
        if (begin < end) {
          copies.push_back(copy_of(
              common,
              segment.at + (begin - segment.row_begin) * stride + block.rank_begin * element, part,
              std::size_t{begin - part.begin} * block.rank_count, end - begin, block.rank_count));
        }
      }
    }
  }
}

void ScatterPlan::list_vector(const Segment& segment, const ScatterCopy& common,
                              std::vector<ScatterCopy>& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::uint32_t column_end = segment.column_begin + segment.num_columns;
  for (const Part& part : matrix.kind == Kind::bias ? layout_.bias_parts(matrix.row)
                                                    : layout_.dora_scale_parts(matrix.row)) {
    const std::uint32_t begin = std::max(part.begin, segment.column_begin);
    const std::uint32_t end = std::min(part.begin + part.length, column_end);
    if (begin < end) {
      copies.push_back(copy_of(common, segment.at + (begin - segment.column_begin) * element, part,
                               begin - part.begin, 1, end - begin));
    }
  }
}

}  // namespace pagedlora
