#include "pagedlora/scatter_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "internal/checksum.h"
#include "internal/value_check.h"
#include "pagedlora/copy_2d.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

// Bytes between two matrices that are cheaper to read than to skip.
constexpr std::uint64_t kMaxGapBytes = 4096;
// Rows of a B matrix that stay in the L1 cache while every block takes its columns.
constexpr std::size_t kTileBytes = 32U << 10;

class FixedTargets final : public ScatterTargets {
 public:
  FixedTargets(const TaskPages& target, const TaskPages* second)
      : target_(target), second_(second) {}

  Access open() override { return {{}, &target_, second_}; }

 private:
  const TaskPages& target_;
  const TaskPages* second_;
};

}  // namespace

// The copies of one segment, listed before they are executed together.
class ScatterPlan::Copies {
 public:
  Copies(Dtype cache_dtype, const std::byte* chunk)
      : cache_dtype_(cache_dtype), target_dtype_(cache_dtype), chunk_(chunk) {}

  // What is added next becomes elements of float32, or else of the cache's dtype.
  void set_float32(bool is_float32) { target_dtype_ = is_float32 ? Dtype::float32 : cache_dtype_; }

  void aim_at(const ScatterTargets::Access& access) {
    target_ = access.target;
    second_ = access.second;
  }

  // From `at` in the chunk to the place that starts `element` elements into the part.
  void add(std::size_t at, std::size_t source_stride_bytes, const Part& part, std::size_t element,
           std::size_t rows, std::size_t columns) {
    const std::size_t offset = element * element_bytes(target_dtype_);
    copies_.push_back({chunk_ + at, source_stride_bytes, target_->address(part.at) + offset,
                       second_ == nullptr ? nullptr : second_->address(part.at) + offset, rows,
                       columns});
  }

  // At once: source rows to columns of a part whose rows are `target_stride` elements long, from
  // its given element on. False if a finite value overflowed float16.
  [[nodiscard]] bool transpose(std::size_t at, std::size_t source_stride_bytes, Dtype source_dtype,
                               const Part& part, std::size_t element, std::size_t target_stride,
                               std::size_t rows, std::size_t columns) const {
    const std::size_t offset = element * element_bytes(target_dtype_);
    return transpose_2d({chunk_ + at, source_stride_bytes, target_->address(part.at) + offset,
                         second_ == nullptr ? nullptr : second_->address(part.at) + offset,
                         target_stride, rows, columns},
                        source_dtype, target_dtype_);
  }

  // False if a finite value overflowed float16.
  [[nodiscard]] bool execute(Dtype source_dtype) {
    const bool fits = copy_2d(copies_, source_dtype, target_dtype_);
    copies_.clear();
    return fits;
  }

 private:
  Dtype cache_dtype_;
  Dtype target_dtype_;
  const std::byte* chunk_;
  const TaskPages* target_ = nullptr;
  const TaskPages* second_ = nullptr;
  std::vector<Copy2d> copies_;
};

// Groups matrices that lie together into windows of at most one chunk.
class ScatterPlan::WindowBuilder {
 public:
  WindowBuilder(std::span<const Matrix> matrices, std::size_t chunk_bytes)
      : matrices_(matrices), chunk_bytes_(chunk_bytes) {}

  // False when everything has been handed out.
  bool next(Window& window) {
    window.segments.clear();
    window.bytes = 0;
    while (matrix_ < matrices_.size() && append(matrices_[matrix_], window)) {
    }
    return !window.segments.empty();
  }

 private:
  // Adds as much of the matrix as fits; false if the window is complete.
  bool append(const Matrix& matrix, Window& window) {
    const std::size_t element = element_bytes(matrix.dtype);
    const std::uint64_t row_bytes = std::uint64_t{matrix.width} * element;
    const std::uint64_t begin = matrix.offset + row_ * matrix.stride_bytes + column_ * element;
    if (window.segments.empty()) {
      window.offset = begin;
    }
    const std::uint64_t at = begin - window.offset;
    if (at > window.bytes + kMaxGapBytes || at >= chunk_bytes_) {
      return false;
    }
    const std::uint64_t room = chunk_bytes_ - at;
    Segment segment{&matrix, static_cast<std::size_t>(at), row_, 1, column_, 0};
    if (column_ == 0 && row_bytes <= room) {
      segment.num_rows = rows_within(matrix, row_bytes, room);
      segment.num_columns = matrix.width;
    } else if (window.segments.empty()) {  // one row is longer than a chunk: take a piece of it
      segment.num_columns = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(room / element, matrix.width - column_));
    } else {
      return false;
    }
    advance(matrix, segment);
    const std::size_t before_last = (segment.num_rows - 1) * matrix.stride_bytes;
    window.bytes = std::max(window.bytes, segment.at + before_last + segment.num_columns * element);
    window.segments.push_back(segment);
    return true;
  }

  // Rows from row_ on that fit into `room` bytes, the first of which does; only that one if what
  // lies between them is better skipped.
  std::uint32_t rows_within(const Matrix& matrix, std::uint64_t row_bytes,
                            std::uint64_t room) const {
    if (matrix.stride_bytes - row_bytes > kMaxGapBytes) {
      return 1;
    }
    const std::uint64_t rows = (room - row_bytes) / matrix.stride_bytes + 1;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(rows, matrix.height - row_));
  }

  void advance(const Matrix& matrix, const Segment& segment) {
    column_ += segment.num_columns;
    if (column_ == matrix.width) {
      column_ = 0;
      row_ += segment.num_rows;
    }
    if (row_ == matrix.height) {
      row_ = 0;
      ++matrix_;
    }
  }

  std::span<const Matrix> matrices_;
  std::size_t chunk_bytes_;
  std::size_t matrix_ = 0;
  std::uint32_t row_ = 0;
  std::uint32_t column_ = 0;
};

ScatterPlan::ScatterPlan(const LoraModelConfig& config, const AdapterPlan& plan,
                         const Layout& layout, bool check_values)
    : config_(config), plan_(plan), layout_(layout), check_values_(check_values) {
  matrices_.reserve(plan.rows().size() * 2);
  for (std::uint32_t i = 0; i < plan.rows().size(); ++i) {
    const PlannedRow& row = plan.rows()[i];
    add(i, Kind::a, row.a, row.rank, row.in.length);
    add(i, Kind::b, row.b, row.out.length, row.rank);
    add(i, Kind::bias, row.bias, row.out.length);
    add(i, Kind::dora_scale, row.dora_scale, row.out.length);
  }
  std::ranges::stable_sort(matrices_, {}, &Matrix::offset);
}

void ScatterPlan::add(std::uint32_t row, Kind kind, const PlannedVector& vector,
                      std::uint32_t length) {
  if (vector.is_there()) {
    add(row, kind, PlannedMatrix{vector.offset, vector.dtype}, 1, length);
  }
}

void ScatterPlan::add(std::uint32_t row, Kind kind, const PlannedMatrix& matrix,
                      std::uint32_t height, std::uint32_t width) {
  const std::size_t stride = matrix.row_stride == 0 ? width : matrix.row_stride;
  matrices_.push_back({matrix.offset, row, kind, matrix.dtype, height, width,
                       stride * element_bytes(matrix.dtype)});
}

std::uint64_t ScatterPlan::source_bytes(std::size_t chunk_bytes) const {
  WindowBuilder windows(matrices_, chunk_bytes);
  std::uint64_t bytes = 0;
  for (Window window; windows.next(window);) {
    bytes += window.bytes;
  }
  return bytes;
}

ScatterPlan::Outcome ScatterPlan::execute(SourceReader& reader, Dtype cache_dtype,
                                          std::span<std::byte> chunk, ScatterTargets& targets,
                                          std::size_t max_chunks) const {
  if (chunk.size() < kMinChunkBytes) {
    throw std::logic_error("the chunk is smaller than ScatterPlan::kMinChunkBytes");
  }
  internal::Checksum checksum;
  Copies copies(cache_dtype, chunk.data());
  WindowBuilder windows(matrices_, chunk.size());
  Window window;
  Outcome outcome;
  for (std::size_t i = 0; i < max_chunks && windows.next(window); ++i) {
    const std::span<std::byte> bytes = chunk.first(window.bytes);
    reader.read(window.offset, bytes);
    checksum.update(bytes);
    outcome.source_bytes += bytes.size();
    if (check_values_) {
      check_values(window, bytes, cache_dtype);
    }
    const ScatterTargets::Access access = targets.open();
    copies.aim_at(access);
    write(window, copies);
  }
  outcome.checksum = checksum.value();
  return outcome;
}

ScatterPlan::Outcome ScatterPlan::execute(SourceReader& reader, Dtype cache_dtype,
                                          std::span<std::byte> chunk, const TaskPages& target,
                                          const TaskPages* second) const {
  FixedTargets targets(target, second);
  return execute(reader, cache_dtype, chunk, targets);
}

void ScatterPlan::write(const Window& window, Copies& copies) const {
  for (const Segment& segment : window.segments) {
    const Kind kind = segment.matrix->kind;
    copies.set_float32(kind == Kind::bias || kind == Kind::dora_scale);
    if (kind == Kind::a && layout_.rows()[segment.matrix->row].kind == ModuleKind::embedding) {
      if (!transpose_a(segment, copies)) {
        refuse_overflow(*segment.matrix);
      }
    } else if (kind == Kind::a) {
      list_a(segment, copies);
    } else if (kind == Kind::b) {
      list_b(segment, copies);
    } else {
      list_vector(segment, copies);
    }
    if (!copies.execute(segment.matrix->dtype)) {
      refuse_overflow(*segment.matrix);
    }
  }
}

void ScatterPlan::list_a(const Segment& segment, Copies& copies) const {
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
        copies.add(segment.at + (row - segment.row_begin) * stride +
                       (begin - segment.column_begin) * element,
                   stride, part,
                   std::size_t{row - block.rank_begin} * part.length + (begin - part.begin), rows,
                   end - begin);
      }
    }
    row += rows;
  }
}

// Of an embedding: its parts are [features, ranks of the block].
bool ScatterPlan::transpose_a(const Segment& segment, const Copies& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::uint32_t row_end = segment.row_begin + segment.num_rows;
  const std::uint32_t column_end = segment.column_begin + segment.num_columns;
  bool fits = true;
  for (const Block& block : layout_.blocks_of_row(matrix.row)) {
    const std::uint32_t first = std::max<std::uint32_t>(block.rank_begin, segment.row_begin);
    const std::uint32_t last =
        std::min<std::uint32_t>(block.rank_begin + block.rank_count, row_end);
    for (const Part& part : layout_.a_parts(block)) {
      const std::uint32_t begin = std::max(part.begin, segment.column_begin);
      const std::uint32_t end = std::min(part.begin + part.length, column_end);
      if (first < last && begin < end) {
        fits &= copies.transpose(
            segment.at + (first - segment.row_begin) * matrix.stride_bytes +
                (begin - segment.column_begin) * element,
            matrix.stride_bytes, matrix.dtype, part,
            std::size_t{begin - part.begin} * block.rank_count + (first - block.rank_begin),
            block.rank_count, last - first, end - begin);
      }
    }
  }
  return fits;
}

void ScatterPlan::list_b(const Segment& segment, Copies& copies) const {
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
          copies.add(segment.at + (begin - segment.row_begin) * stride + block.rank_begin * element,
                     stride, part, std::size_t{begin - part.begin} * block.rank_count, end - begin,
                     block.rank_count);
        }
      }
    }
  }
}

void ScatterPlan::list_vector(const Segment& segment, Copies& copies) const {
  const Matrix& matrix = *segment.matrix;
  const std::size_t element = element_bytes(matrix.dtype);
  const std::uint32_t column_end = segment.column_begin + segment.num_columns;
  for (const Part& part : matrix.kind == Kind::bias ? layout_.bias_parts(matrix.row)
                                                    : layout_.dora_scale_parts(matrix.row)) {
    const std::uint32_t begin = std::max(part.begin, segment.column_begin);
    const std::uint32_t end = std::min(part.begin + part.length, column_end);
    if (begin < end) {
      copies.add(segment.at + (begin - segment.column_begin) * element, matrix.stride_bytes, part,
                 begin - part.begin, 1, end - begin);
    }
  }
}

void ScatterPlan::check_values(const Window& window, std::span<const std::byte> chunk,
                               Dtype cache_dtype) const {
  for (const Segment& segment : window.segments) {
    const Matrix& matrix = *segment.matrix;
    const bool is_vector = matrix.kind == Kind::bias || matrix.kind == Kind::dora_scale;
    const Dtype target = is_vector ? Dtype::float32 : cache_dtype;
    const bool is_whole = matrix.stride_bytes == segment.num_columns * element_bytes(matrix.dtype);
    const std::size_t rows = is_whole ? 1 : segment.num_rows;
    const std::size_t columns = std::size_t{segment.num_columns} * segment.num_rows / rows;
    for (std::size_t row = 0; row < rows; ++row) {
      const std::byte* values = chunk.data() + segment.at + row * matrix.stride_bytes;
      switch (internal::find_problem(values, columns, matrix.dtype, target)) {
        case internal::ValueProblem::none:
          break;
        case internal::ValueProblem::not_finite:
          throw AdapterFormatError(plan_.source()->description(), label(matrix),
                                   "has values that are NaN or infinite");
        case internal::ValueProblem::over_range:
          throw AdapterFormatError(plan_.source()->description(), label(matrix),
                                   "has values over the range of the cache's type, " +
                                       std::string(dtype_name(target)) +
                                       "; use dtype=\"float32\" for the cache");
      }
    }
  }
}

std::string ScatterPlan::label(const Matrix& matrix) const {
  const std::string& module = config_.module(plan_.rows()[matrix.row].module).name;
  switch (matrix.kind) {
    case Kind::a:
      return module + ".lora_A";
    case Kind::b:
      return module + ".lora_B";
    case Kind::bias:
      return module + ".lora_B.bias";
    case Kind::dora_scale:
      return module + ".lora_magnitude_vector";
  }
  return module;
}

void ScatterPlan::refuse_overflow(const Matrix& matrix) const {
  throw AdapterFormatError(plan_.source()->description(), label(matrix),
                           "a value is beyond the range of the cache's float16; use "
                           "dtype=\"bfloat16\" or \"float32\" for the cache");
}

}  // namespace pagedlora
