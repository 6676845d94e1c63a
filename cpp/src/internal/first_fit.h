// First-fit placement of byte ranges into pages of equal size.
//
// Finding the first page with room takes O(log pages): a maximum tree over the free bytes of
// each page.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagedlora/layout.h"

namespace pagedlora::internal {

class FirstFit {
 public:
  explicit FirstFit(std::size_t slots_per_page) : slots_per_page_(slots_per_page) {}

  // `slots` is at least 1 and at most slots_per_page.
  PartLocation place(std::size_t slots);
  std::uint32_t num_pages() const { return num_pages_; }

 private:
  void grow();

  std::size_t slots_per_page_;
  std::uint32_t num_pages_ = 0;
  std::size_t num_leaves_ = 0;         // a power of two
  std::vector<std::size_t> max_free_;  // heap order; leaves hold a page's free slots at its end
};

}  // namespace pagedlora::internal
