// Copies of scatter plans, made ready for one launch: for one adapter or for many.
//
// Every copy becomes a descriptor, and is cut into tiles of about 16 KiB, one per thread block. The
// tiles are listed: a block finds its work with one load. A search in a table of sums would take
// log2(descriptors) loads, each waiting for the one before, to save 8 bytes per tile.
//
// ScatterList: thread-compatible. The rest are plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pagedlora/dtype.h"
#include "pagedlora/layout.h"
#include "pagedlora/scatter_plan.h"

namespace pagedlora::cuda {

// What a thread moves at a time.
enum class ScatterMode : std::uint8_t {
  vectors,  // 16 bytes of the target
  elements,
  columns,  // of the source, up to 8 ranks: transposed
};

// One ScatterCopy with addresses.
struct ScatterDescriptor {
  const std::byte* source;
  std::byte* target;
  std::uint64_t source_stride_bytes;
  std::uint32_t rows;
  std::uint32_t columns;
  std::uint32_t target_stride;  // of transposed copies: elements between columns
  std::uint32_t report;         // what is stored in the overflow word; never 0
  std::uint32_t overflow_word;  // which one
  Dtype source_dtype;
  Dtype target_dtype;
  ScatterMode mode;
  bool source_is_aligned;  // to its elements
};

struct ScatterTile {
  std::uint32_t descriptor;
  std::uint32_t first_unit;
};

// What a launch reads. All addresses are the device's: pinned host memory that is mapped there will
// do for sources.
struct ScatterWork {
  const ScatterDescriptor* descriptors = nullptr;
  const ScatterTile* tiles = nullptr;
  std::uint32_t num_tiles = 0;
  std::uint32_t* overflow_words = nullptr;  // zeroed by the caller; see ScatterList::add
};

// How often a thread has to move something.
std::uint32_t num_units(const ScatterDescriptor& descriptor);

class ScatterList {
 public:
  // Appends copies of a chunk whose first byte is at `chunk`, into the pages of `target`. If a
  // finite value overflows float16, overflow_words[overflow_word] becomes 1 + the matrix of one such
  // value, for ScatterPlan::refuse_overflow: use one word per adapter. Copies are fastest if chunk is
  // a multiple of 16.
  void add(std::span<const ScatterCopy> copies, const std::byte* chunk, const TaskPages& target,
           std::uint32_t overflow_word);

  void clear();
  bool empty() const { return descriptors_.empty(); }
  std::span<const ScatterDescriptor> descriptors() const { return descriptors_; }
  std::span<const ScatterTile> tiles() const { return tiles_; }

  // The one upload: image_bytes() bytes, to be written to memory aligned to 8.
  std::size_t image_bytes() const;
  void write_image(std::byte* into) const;
  ScatterWork work_of(const std::byte* image, std::uint32_t* overflow_words) const;

 private:
  std::vector<ScatterDescriptor> descriptors_;
  std::vector<ScatterTile> tiles_;
};

}  // namespace pagedlora::cuda
