// Where the weights of an adapter lie in pages: pure arithmetic, the same in both tiers.
//
// A row (A [rank, in] and B [out, rank] of a module, or of a slice of it) is cut into blocks of at
// most 8 ranks; the tail block has what is left and is never padded. A block has a part A
// [rank_count, in] and a part B [out, rank_count], both row-major. BA of a row is the sum of its
// blocks:
//
//     row of rank 19            block 0 (ranks 0-7)    block 1 (ranks 8-15)   block 2 (ranks 16-18)
//     A [19, in], B [out, 19]   A [8, in] B [out, 8]   A [8, in] B [out, 8]   A [3, in] B [out, 3]
//
// A of an embedding is stored as [in, rank_count], so that a token's column lies in one piece.
//
// A row may also have a bias and a DoRA scale [out]: parts behind its blocks, always of float32. A
// DoRA scale multiplies the whole output of the module, whose error it would otherwise decide.
//
// A part over max_part_bytes is tiled: A along in (a tile is [rank_count, length]), B along out
// (a tile is [length, rank_count]). Every part lies inside one page at a multiple of kSlotBytes.
// Parts are placed first fit, in module order, A before B; the two need not share a page.
//
// Adapters of one shape share one Layout; a task adds only its page ids. `page` in a PartLocation
// is a position in the task's list of pages, not a PageId.
//
// Immutable after construction; thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pagedlora/ids.h"
#include "pagedlora/lora_module.h"

namespace pagedlora {

namespace internal {
class FirstFit;
}

inline constexpr std::size_t kSlotBytes = 64;
inline constexpr std::uint32_t kMaxBlockRanks = 8;

// Some neighbouring features of a module's input or output.
struct FeatureRange {
  std::uint32_t offset = 0;
  std::uint32_t length = 0;

  std::uint32_t end() const { return offset + length; }
  bool overlaps(const FeatureRange& other) const {
    return offset < other.end() && other.offset < end();
  }
  friend auto operator<=>(const FeatureRange&, const FeatureRange&) = default;
};

// The range with a length of 0 turned into all features from the offset on. Throws
// InvalidArgumentError if it goes beyond `features`.
FeatureRange resolved(FeatureRange range, std::int64_t features);

// A module that an adapter touches, with which rank, and which of its features.
struct RowShape {
  ModuleIndex module;
  std::uint32_t rank = 0;
  FeatureRange in = {};  // length 0 means: to the module's end
  FeatureRange out = {};
  bool has_bias = false;
  bool has_dora_scale = false;
  ModuleKind kind = ModuleKind::linear;  // of the module; filled in by Layout

  friend bool operator==(const RowShape&, const RowShape&) = default;
};

// Throws InvalidArgumentError if two rows of one module change the same weights of it, or one of
// them with a DoRA scale the same outputs. The rows are sorted by module, with the lengths written
// out.
void check_slices(const LoraModelConfig& config, std::span<const RowShape> rows);

struct LayoutParams {
  std::size_t page_bytes = 0;      // a multiple of kSlotBytes
  std::size_t element_bytes = 0;   // of the cache's dtype
  std::size_t max_part_bytes = 0;  // at most page_bytes; 0 means page_bytes

  friend bool operator==(const LayoutParams&, const LayoutParams&) = default;
};

// The same with max_part_bytes filled in. Throws InvalidArgumentError for sizes that no layout can
// have.
LayoutParams checked(LayoutParams params);

struct PartLocation {
  std::uint32_t page = 0;  // position in the task's list of pages
  std::uint32_t slot = 0;  // offset in the page, in units of kSlotBytes
};

// A tile of a block's A (begin and length count the row's input features), or of B, a bias or a
// DoRA scale (output features).
struct Part {
  std::uint32_t begin = 0;
  std::uint32_t length = 0;
  PartLocation at;
};

struct Block {
  std::uint32_t row = 0;         // position in Layout::rows()
  std::uint16_t rank_begin = 0;  // first rank of the row that lies here
  std::uint16_t rank_count = 0;  // 1..kMaxBlockRanks
  std::uint32_t first_part = 0;  // A parts first, then B parts, in Layout::parts()
  std::uint32_t num_a_parts = 0;
  std::uint32_t num_b_parts = 0;
};

class Layout {
 public:
  // Rows must name modules of `config` in ascending order, with rank >= 1, and no two of one module
  // the same inputs for the same outputs. Throws InvalidArgumentError otherwise, or if page_bytes
  // cannot hold one feature of a block.
  Layout(const LoraModelConfig& config, std::vector<RowShape> rows, const LayoutParams& params);

  const std::vector<RowShape>& rows() const { return rows_; }  // with the lengths written out
  const LayoutParams& params() const { return params_; }
  std::uint32_t num_pages() const { return num_pages_; }
  std::size_t payload_bytes() const { return payload_bytes_; }  // bytes of weights, without gaps

  // Modules of the model that the layout was made for.
  std::size_t num_modules() const { return first_row_of_module_.size() - 1; }

  // Positions [first, second) of the module's rows in rows(); none if the adapter does not touch
  // it.
  std::pair<std::uint32_t, std::uint32_t> rows_of(ModuleIndex module) const {
    if (module.value >= num_modules()) {
      return {0, 0};
    }
    return {first_row_of_module_[module.value], first_row_of_module_[module.value + 1]};
  }

  std::span<const Block> blocks() const { return blocks_; }
  std::span<const Block> blocks_of_row(std::uint32_t row) const;
  std::span<const Part> a_parts(const Block& block) const;
  std::span<const Part> b_parts(const Block& block) const;
  std::span<const Part> bias_parts(std::uint32_t row) const;  // none: it has no bias
  std::span<const Part> dora_scale_parts(std::uint32_t row) const;
  bool has_dora_scales() const { return has_dora_scales_; }  // any of its rows

  // Bytes of memory this object holds.
  std::size_t memory_bytes() const;

 private:
  struct VectorParts {
    std::uint32_t first = 0;  // bias parts first, then those of the DoRA scale, in parts_
    std::uint32_t num_bias = 0;
    std::uint32_t num_dora_scale = 0;
  };

  void place_vectors(std::uint32_t row, internal::FirstFit& pages);

  std::vector<RowShape> rows_;
  LayoutParams params_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> first_block_of_row_;  // rows_.size() + 1 entries
  std::vector<Part> parts_;
  std::vector<std::uint32_t> first_row_of_module_;  // number of modules + 1 entries
  std::vector<VectorParts> vectors_of_row_;         // empty if no row has any
  bool has_dora_scales_ = false;
  std::uint32_t num_pages_ = 0;
  std::size_t payload_bytes_ = 0;
};

// Where the pages of one resident task really are. A view: valid while the task is leased or
// pinned in its tier.
struct TaskPages {
  const Layout* layout = nullptr;
  const PageId* pages = nullptr;  // layout->num_pages() of them
  const float* scales = nullptr;  // one per row of the layout
  std::byte* base = nullptr;      // address of page 0 of the pool
  std::size_t page_bytes = 0;
  Dtype dtype = Dtype::float32;  // of the weights
  bool is_cpu_readable = true;   // false: addresses are a GPU's

  std::byte* address(PartLocation at) const {
    return base + static_cast<std::size_t>(pages[at.page].value) * page_bytes +
           static_cast<std::size_t>(at.slot) * kSlotBytes;
  }
};

}  // namespace pagedlora
