// Where rows lie: in the [heads, tokens, dim] views of the row, and in the paged cache.
//
// Pure functions and a plain cursor; thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/paged_attention.h"

namespace pagedlora::internal {

inline const std::byte* row_of(const HeadsView& view, std::int64_t head, std::int64_t token,
                               std::size_t element_bytes) {
  const std::int64_t offset = head * view.head_stride + token * view.token_stride;
  return static_cast<const std::byte*>(view.data) +
         offset * static_cast<std::int64_t>(element_bytes);
}

// Walks the positions of a sequence: next() is the place in the cache, counted in tokens.
class SlotCursor {
 public:
  SlotCursor(const AttentionBatch::Sequence& sequence, std::int64_t block_size, std::int64_t first)
      : block_(sequence.blocks.data() + first / block_size),
        block_size_(block_size),
        offset_(first % block_size) {}

  std::int64_t next() {
    const std::int64_t slot = *block_ * block_size_ + offset_;
    if (++offset_ == block_size_) {
      offset_ = 0;
      ++block_;
    }
    return slot;
  }

 private:
  const std::int32_t* block_;
  std::int64_t block_size_;
  std::int64_t offset_;
};

}  // namespace pagedlora::internal
