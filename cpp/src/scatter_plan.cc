#include "pagedlora/scatter_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "internal/checksum.h"
#include "internal/copy_kernels.h"
#include "internal/value_check.h"
#include "pagedlora/copy_2d.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

// Bytes between two matrices that are cheaper to read than to skip.
constexpr std::uint64_t kMaxGapBytes = 4096;

// What is summed up and then copied at a time, so that the L1 cache still has it for the copy.
constexpr std::size_t kHotBytes = 16U << 10;

// Copies are complete before the lock of their targets is released, however they end.
struct CopiesEnd {
  CopiesEnd() = default;
  CopiesEnd(const CopiesEnd&) = delete;
  CopiesEnd& operator=(const CopiesEnd&) = delete;
  ~CopiesEnd() { internal::finish_copies(); }
};

class FixedTargets final : public ScatterTargets {
 public:
  FixedTargets(const TaskPages& target, const TaskPages* second)
      : target_(target), second_(second) {}

  Access open(std::size_t /*chunk*/) override { return {{}, &target_, second_}; }

 private:
  const TaskPages& target_;
  const TaskPages* second_;
};

}  // namespace

// Carries out the copies of one segment together.
class ScatterPlan::CpuExecutor {
 public:
  explicit CpuExecutor(const std::byte* chunk) : chunk_(chunk) {}

  void aim_at(const ScatterTargets::Access& access) {
    target_ = access.target;
    second_ = access.second;
  }

  // To be filled with the copies of a segment, for execute().
  std::vector<ScatterCopy>& list() {
    listed_.clear();
    return listed_;
  }

  // False if a finite value overflowed float16.
  [[nodiscard]] bool execute() {
    bool fits = true;
    copies_.clear();
    for (const ScatterCopy& copy : listed_) {
      std::byte* target = target_->address(copy.part) + copy.offset_bytes;
      std::byte* second =
          second_ == nullptr ? nullptr : second_->address(copy.part) + copy.offset_bytes;
      if (copy.target_stride == 0) {
        copies_.push_back(
            {chunk_ + copy.at, copy.source_stride_bytes, target, second, copy.rows, copy.columns});
      } else {
        fits &= transpose_2d({chunk_ + copy.at, copy.source_stride_bytes, target, second,
                              copy.target_stride, copy.rows, copy.columns},
                             copy.source_dtype, copy.target_dtype);
      }
    }
    if (!copies_.empty()) {
      const ScatterCopy& first = listed_.front();
      fits &= internal::copy_kernel(first.source_dtype, first.target_dtype)(copies_.data(),
                                                                            copies_.size());
    }
    return fits;
  }

 private:
  const std::byte* chunk_;
  const TaskPages* target_ = nullptr;
  const TaskPages* second_ = nullptr;
  std::vector<ScatterCopy> listed_;
  std::vector<Copy2d> copies_;
};

// Groups matrices that lie together into windows of at most one chunk.
class ScatterPlan::WindowBuilder {
 public:
  WindowBuilder(std::span<const Matrix> matrices, std::size_t chunk_bytes, Cursor begin = {})
      : matrices_(matrices), chunk_bytes_(chunk_bytes), at_(begin) {}

  // Where the next window begins.
  const Cursor& at() const { return at_; }

  // False when everything has been handed out.
  bool next(Window& window) {
    window.segments.clear();
    window.bytes = 0;
    while (at_.matrix < matrices_.size() && append(matrices_[at_.matrix], window)) {
    }
    return !window.segments.empty();
  }

 private:
  // Adds as much of the matrix as fits; false if the window is complete.
  bool append(const Matrix& matrix, Window& window) {
    const std::size_t element = element_bytes(matrix.dtype);
    const std::uint64_t row_bytes = std::uint64_t{matrix.width} * element;
    const std::uint64_t begin =
        matrix.offset + at_.row * matrix.stride_bytes + at_.column * element;
    if (window.segments.empty()) {
      window.offset = begin;
    }
    const std::uint64_t at = begin - window.offset;
    if (at > window.bytes + kMaxGapBytes || at >= chunk_bytes_) {
      return false;
    }
    const std::uint64_t room = chunk_bytes_ - at;
    Segment segment{&matrix, static_cast<std::size_t>(at), at_.row, 1, at_.column, 0};
    if (at_.column == 0 && row_bytes <= room) {
      segment.num_rows = rows_within(matrix, row_bytes, room);
      segment.num_columns = matrix.width;
    } else if (window.segments.empty()) {  // one row is longer than a chunk: take a piece of it
      segment.num_columns = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(room / element, matrix.width - at_.column));
    } else {
      return false;
    }
    advance(matrix, segment);
    window.bytes = std::max(window.bytes, end_of(segment));
    window.segments.push_back(segment);
    return true;
  }

  // Rows from at_.row on that fit into `room` bytes, the first of which does; only that one if what
  // lies between them is better skipped.
  std::uint32_t rows_within(const Matrix& matrix, std::uint64_t row_bytes,
                            std::uint64_t room) const {
    if (matrix.stride_bytes - row_bytes > kMaxGapBytes) {
      return 1;
    }
    const std::uint64_t rows = (room - row_bytes) / matrix.stride_bytes + 1;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(rows, matrix.height - at_.row));
  }

  void advance(const Matrix& matrix, const Segment& segment) {
    at_.column += segment.num_columns;
    if (at_.column == matrix.width) {
      at_.column = 0;
      at_.row += segment.num_rows;
    }
    if (at_.row == matrix.height) {
      at_.row = 0;
      ++at_.matrix;
    }
  }

  std::span<const Matrix> matrices_;
  std::size_t chunk_bytes_;
  Cursor at_;
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

// Whole blocks of A, so that tiles make no more copies than segments would.
ScatterPlan::Segment ScatterPlan::first_tile(const Segment& segment) {
  return tile_from(segment, segment.row_begin);
}

// One without rows is behind the last one.
ScatterPlan::Segment ScatterPlan::next_tile(const Segment& segment, const Segment& tile) {
  return tile_from(segment, tile.row_begin + tile.num_rows);
}

ScatterPlan::Segment ScatterPlan::tile_from(const Segment& segment, std::uint32_t row) {
  const std::size_t stride = segment.matrix->stride_bytes;
  const auto blocks = static_cast<std::uint32_t>(kHotBytes / (stride * kMaxBlockRanks));
  const std::uint32_t rows = std::max(blocks, 1U) * kMaxBlockRanks;
  const std::uint32_t end =
      std::min(row / kMaxBlockRanks * kMaxBlockRanks + rows, segment.row_begin + segment.num_rows);
  Segment tile = segment;
  tile.at = segment.at + (row - segment.row_begin) * stride;
  tile.row_begin = row;
  tile.num_rows = end - row;
  return tile;
}

std::size_t ScatterPlan::end_of(const Segment& segment) {
  return segment.at + (segment.num_rows - 1) * segment.matrix->stride_bytes +
         segment.num_columns * element_bytes(segment.matrix->dtype);
}

ScatterPlan::Outcome ScatterPlan::execute(SourceReader& reader, Dtype cache_dtype,
                                          std::span<std::byte> chunk, ScatterTargets& targets,
                                          const Piece& piece) const {
  if (chunk.size() < kMinChunkBytes) {
    throw std::logic_error("the chunk is smaller than ScatterPlan::kMinChunkBytes");
  }
  internal::Checksum checksum;
  CpuExecutor executor(chunk.data());
  WindowBuilder windows(matrices_, chunk.size(), piece.begin);
  Window window;
  Outcome outcome;
  for (std::size_t i = 0; i < piece.num_chunks && windows.next(window); ++i) {
    if (!targets.wants(piece.first_chunk + i)) {
      continue;
    }
    const std::span<std::byte> bytes = chunk.first(window.bytes);
    reader.read(window.offset, bytes);
    outcome.source_bytes += bytes.size();
    if (check_values_) {
      check_values(window, bytes, cache_dtype);
    }
    const ScatterTargets::Access access = targets.open(piece.first_chunk + i);
    executor.aim_at(access);
    const CopiesEnd copies_end;
    internal::Checksum::Piece summed_up(checksum, bytes);
    for (const Segment& segment : window.segments) {
      for (Segment tile = first_tile(segment); tile.num_rows != 0;
           tile = next_tile(segment, tile)) {
        summed_up.add_up_to(end_of(tile));
        list(tile, cache_dtype, executor.list());
        if (!executor.execute()) {
          refuse_overflow(index_of(*segment.matrix));
        }
      }
    }
    summed_up.finish();
  }
  outcome.checksum = checksum.value();
  return outcome;
}

ScatterPlan::Outcome ScatterPlan::execute(SourceReader& reader, Dtype cache_dtype,
                                          std::span<std::byte> chunk, const TaskPages& target,
                                          const TaskPages* second) const {
  FixedTargets targets(target, second);
  return execute(reader, cache_dtype, chunk, targets, Piece{});
}

std::vector<ScatterPlan::Piece> ScatterPlan::pieces(std::size_t chunk_bytes,
                                                    std::size_t piece_bytes) const {
  std::vector<Piece> pieces;
  WindowBuilder windows(matrices_, chunk_bytes);
  Window window;
  std::size_t num_chunks = 0;
  std::size_t left_bytes = 0;  // of the last piece
  for (Cursor begin; windows.next(window); begin = windows.at(), ++num_chunks) {
    if (left_bytes == 0) {
      pieces.push_back({begin, num_chunks, 0});
      left_bytes = piece_bytes;
    }
    ++pieces.back().num_chunks;
    left_bytes -= std::min(left_bytes, window.bytes);
  }
  return pieces;
}

void ScatterPlan::list_copies(Dtype cache_dtype, std::size_t chunk_bytes,
                              const std::function<void(const Chunk&)>& visit) const {
  if (chunk_bytes < kMinChunkBytes) {
    throw std::logic_error("the chunk is smaller than ScatterPlan::kMinChunkBytes");
  }
  WindowBuilder windows(matrices_, chunk_bytes);
  std::vector<ScatterCopy> copies;
  for (Window window; windows.next(window);) {
    copies.clear();
    for (const Segment& segment : window.segments) {
      list(segment, cache_dtype, copies);
    }
    visit({window.offset, window.bytes, copies});
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

std::uint32_t ScatterPlan::index_of(const Matrix& matrix) const {
  return static_cast<std::uint32_t>(&matrix - matrices_.data());
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

void ScatterPlan::refuse_overflow(std::uint32_t matrix) const {
  throw AdapterFormatError(plan_.source()->description(), label(matrices_.at(matrix)),
                           "a value is beyond the range of the cache's float16; use "
                           "dtype=\"bfloat16\" or \"float32\" for the cache");
}

}  // namespace pagedlora
