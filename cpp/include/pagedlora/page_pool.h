// All pages of one tier: one arena, cut into pages of equal size, and the set of free ones.
//
// A claim takes the lowest free pages, so that neighbours merge into long copies. Claiming
// and releasing cost O(pages moved), whatever the size of the pool.
//
// The arena is made cheap to write block by block on a thread of its own; nothing waits for it.
//
// The memory lasts as long as anybody shares arena(), also when the pool is gone.
//
// Thread-compatible: the caller holds the tier's lock. base() and page_bytes() are immutable.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pagedlora/device.h"
#include "pagedlora/ids.h"
#include "pagedlora/process_mark.h"

namespace pagedlora {

class PagePool {
 public:
  // `tier` names the pool in errors. Throws OutOfMemoryError, or InvalidArgumentError when there
  // would be no page or more than 2^32 - 1.
  PagePool(std::shared_ptr<Device> device, std::string tier, std::size_t num_pages,
           std::size_t page_bytes);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Fills `pages` with free pages, lowest first, or changes nothing and returns false.
  [[nodiscard]] bool try_claim(std::span<PageId> pages);

  // Each page must be claimed: a page released twice is a broken invariant (std::logic_error).
  void release(std::span<const PageId> pages);

  bool is_free(PageId page) const;
  std::size_t num_pages() const { return num_pages_; }
  std::size_t num_free() const { return num_free_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t arena_bytes() const { return num_pages_ * page_bytes_; }
  std::byte* base() const { return arena_.get(); }
  std::shared_ptr<const void> arena() const { return arena_; }  // keeps the memory of the pages
  const std::shared_ptr<Device>& device() const { return device_; }

 private:
  void mark(std::size_t page, bool free);
  std::size_t lowest_free() const;
  void start_prefault() noexcept;
  void prefault_blocks();

  ProcessMark process_;
  std::shared_ptr<Device> device_;
  std::size_t num_pages_;
  std::size_t page_bytes_;
  std::size_t num_free_;
  std::shared_ptr<std::byte> arena_;
  // Bit i of level k+1 is set when word i of level k is not zero; level 0 has a bit per page.
  std::vector<std::vector<std::uint64_t>> levels_;
  std::atomic<bool> stop_prefault_{false};
  std::thread prefault_thread_;
};

}  // namespace pagedlora
