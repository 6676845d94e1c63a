// From the bytes of a source to the parts of a layout: one list of 2-D copies, executed here by
// the CPU, or listed for whoever else executes it.
//
// The source is read front to back in chunks that fit the L2 cache; each chunk is cut into
// rectangles, and each rectangle is cast and written to one place, or to the same place of two
// tiers, while it is hot. Whoever executes the plan, the bits are those of dtype.h.
//
// A load may be given up while its source blocks: the targets are asked for anew before each chunk
// is written, and what holds them back from being given away holds for that chunk only.
//
// Chunks that follow each other are pieces, which several threads may execute at a time, each with a
// reader, a chunk and targets of its own.
//
// ScatterPlan: a view of a plan and a layout, which must outlive it; immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pagedlora/adapter_plan.h"
#include "pagedlora/layout.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora {

// The pages that a plan fills, for as long as they may be written.
class ScatterTargets {
 public:
  struct Access {
    std::unique_lock<std::mutex> lock;  // released when the chunk has been written
    const TaskPages* target = nullptr;
    const TaskPages* second = nullptr;  // nullptr, or gets the same bytes in the same pass
  };

  virtual ~ScatterTargets() = default;

  // Whether the chunk of that number, in the order of the source, is to be read.
  virtual bool wants(std::size_t /*chunk*/) { return true; }

  // Where the chunk that has just been read goes. Throws if it is not wanted any more.
  virtual Access open(std::size_t chunk) = 0;
};

// One copy of a plan: a rectangle of the source, row-major, to a place inside one part.
struct ScatterCopy {
  std::size_t at = 0;                   // of its first element, in bytes from the chunk's first one
  std::size_t source_stride_bytes = 0;  // between rows
  PartLocation part;
  std::size_t offset_bytes = 0;  // in the part, of its first element
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
  // 0: rows lie back to back. Else transposed: [columns, rows], so many elements between columns.
  std::uint32_t target_stride = 0;
  std::uint32_t matrix = 0;  // for ScatterPlan::refuse_overflow
  Dtype source_dtype = Dtype::float32;
  Dtype target_dtype = Dtype::float32;
};

class ScatterPlan {
 public:
  // Some bytes of the source, and all copies that read them.
  struct Chunk {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
    std::span<const ScatterCopy> copies;  // valid during the call
  };

  struct Outcome {
    std::uint64_t checksum = 0;      // of what was read; equal for equal bytes and chunk sizes
    std::uint64_t source_bytes = 0;  // that were read
  };

  // Where chunks begin.
  struct Cursor {
    std::size_t matrix = 0;  // in the order of the source
    std::uint32_t row = 0;
    std::uint32_t column = 0;
  };
  struct Piece {
    Cursor begin;
    std::size_t first_chunk = 0;
    std::size_t num_chunks = std::numeric_limits<std::size_t>::max();  // or all that are left
  };

  // `layout` must be of plan.row_shapes(). With `check_values`, execute() refuses values that are not
  // finite, or would not be in the cache.
  ScatterPlan(const LoraModelConfig& config, const AdapterPlan& plan, const Layout& layout,
              bool check_values = false);

  // Reads matrices from the reader, in the order in which they lie there, and fills the parts of
  // the targets that lie in the piece. `chunk` is scratch of at least kMinChunkBytes, and of the size
  // that the piece was made for. May block. Throws what the reader and the targets throw, and
  // AdapterFormatError for a finite value that float16 cannot hold, or what a check of the values
  // finds; the targets are then partly written.
  Outcome execute(SourceReader& reader, Dtype cache_dtype, std::span<std::byte> chunk,
                  ScatterTargets& targets, const Piece& piece) const;

  // All of it, to pages that nobody can take away meanwhile.
  Outcome execute(SourceReader& reader, Dtype cache_dtype, std::span<std::byte> chunk,
                  const TaskPages& target, const TaskPages* second) const;

  // What execute() reads and does with chunks of that size, in its order, for another executor. Reads
  // nothing and checks no values.
  void list_copies(Dtype cache_dtype, std::size_t chunk_bytes,
                   const std::function<void(const Chunk&)>& visit) const;

  // All chunks of that size. A piece ends with the chunk that makes it so many bytes or more.
  std::vector<Piece> pieces(std::size_t chunk_bytes, std::size_t piece_bytes) const;

  // Throws what execute() throws when a copy of that matrix overflowed float16.
  [[noreturn]] void refuse_overflow(std::uint32_t matrix) const;

  // That execute() reads with chunks of that size: each matrix that overlaps none is read once,
  // with what lies between its rows, and between it and the next, if skipping it would cost more.
  std::uint64_t source_bytes(std::size_t chunk_bytes = kChunkBytes) const;

  static constexpr std::size_t kChunkBytes = 256U << 10;
  static constexpr std::size_t kMinChunkBytes = 16U << 10;

 private:
  enum class Kind : std::uint8_t { a, b, bias, dora_scale };
  // A matrix of the source, row-major: A [rank, in], B [out, rank], a vector [1, out].
  struct Matrix {
    std::uint64_t offset;
    std::uint32_t row;  // of the layout
    Kind kind;
    Dtype dtype;
    std::uint32_t height;
    std::uint32_t width;
    std::size_t stride_bytes;  // between rows
  };
  // A rectangle of a matrix that lies in the chunk: whole matrix rows, or a piece of one.
  struct Segment {
    const Matrix* matrix;
    std::size_t at;  // offset in the chunk
    std::uint32_t row_begin;
    std::uint32_t num_rows;
    std::uint32_t column_begin;
    std::uint32_t num_columns;
  };
  struct Window {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
    std::vector<Segment> segments;
  };
  class WindowBuilder;
  class CpuExecutor;

  static Segment first_tile(const Segment& segment);
  static Segment next_tile(const Segment& segment, const Segment& tile);
  static Segment tile_from(const Segment& segment, std::uint32_t row);
  static std::size_t end_of(const Segment& segment);  // offset in the chunk

  void add(std::uint32_t row, Kind kind, const PlannedMatrix& matrix, std::uint32_t height,
           std::uint32_t width);
  void add(std::uint32_t row, Kind kind, const PlannedVector& vector, std::uint32_t length);
  // The copies of a segment, appended to `copies`.
  void list(const Segment& segment, Dtype cache_dtype, std::vector<ScatterCopy>& copies) const;
  void list_a(const Segment& segment, const ScatterCopy& common,
              std::vector<ScatterCopy>& copies) const;
  void list_transposed_a(const Segment& segment, const ScatterCopy& common,
                         std::vector<ScatterCopy>& copies) const;
  void list_b(const Segment& segment, const ScatterCopy& common,
              std::vector<ScatterCopy>& copies) const;
  void list_vector(const Segment& segment, const ScatterCopy& common,
                   std::vector<ScatterCopy>& copies) const;
  void check_values(const Window& window, std::span<const std::byte> chunk,
                    Dtype cache_dtype) const;
  std::uint32_t index_of(const Matrix& matrix) const;
  std::string label(const Matrix& matrix) const;

  const LoraModelConfig& config_;
  const AdapterPlan& plan_;
  const Layout& layout_;
  std::vector<Matrix> matrices_;  // by offset
  bool check_values_;
};

}  // namespace pagedlora
