#include "pagedlora/page_pool.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

constexpr std::size_t kWordBits = 64;
constexpr std::size_t kPrefaultBlockBytes = 16U << 20;

std::size_t words_for(std::size_t bits) { return (bits + kWordBits - 1) / kWordBits; }

}  // namespace

PagePool::PagePool(std::shared_ptr<Device> device, std::string tier, std::size_t num_pages,
                   std::size_t page_bytes)
    : device_(std::move(device)),
      num_pages_(num_pages),
      page_bytes_(page_bytes),
      num_free_(num_pages) {
  if (num_pages == 0 || num_pages > std::numeric_limits<std::uint32_t>::max()) {
    throw InvalidArgumentError(
        "the " + tier + " tier would have " + std::to_string(num_pages) + " pages of " +
        std::to_string(page_bytes) +
        " bytes; 1 to 2^32 - 1 are possible: " + (num_pages == 0 ? "raise " : "lower ") + tier +
        "_cache_size, or give " + (num_pages == 0 ? "smaller" : "larger") + " pages");
  }
  for (std::size_t bits = num_pages; levels_.empty() || levels_.back().size() > 1;
       bits = levels_.back().size()) {
    levels_.emplace_back(words_for(bits), ~std::uint64_t{0});
    if (bits % kWordBits != 0) {
      levels_.back().back() = (std::uint64_t{1} << (bits % kWordBits)) - 1;
    }
  }
  std::byte* arena = device_->try_allocate(arena_bytes());
  if (arena == nullptr) {
    throw OutOfMemoryError(std::move(tier), arena_bytes());
  }
  arena_ = std::shared_ptr<std::byte>(arena,
                                      [device = device_, bytes = arena_bytes()](std::byte* memory) {
                                        device->deallocate(memory, bytes);
                                      });
  start_prefault();  // last: from here on nothing may throw
}

void PagePool::start_prefault() noexcept {
  if (arena_bytes() <= kPrefaultBlockBytes) {
    device_->prefault(arena_.get(), arena_bytes());
    return;
  }
  try {
    prefault_thread_ = std::thread([this] { prefault_blocks(); });
  } catch (const std::exception&) {
    stop_prefault_ = true;  // no thread to be had: pages become present when first written
  }
}

PagePool::~PagePool() {
  if (!process_.is_here()) {
    internal::leak(arena_);                       // the device's calls are its process's
    internal::leak(std::move(prefault_thread_));  // and so is the thread
    return;
  }
  stop_prefault_ = true;
  if (prefault_thread_.joinable()) {
    prefault_thread_.join();
  }
}

void PagePool::prefault_blocks() {
  for (std::size_t at = 0; at < arena_bytes() && !stop_prefault_; at += kPrefaultBlockBytes) {
    device_->prefault(arena_.get() + at, std::min(kPrefaultBlockBytes, arena_bytes() - at));
  }
}

bool PagePool::try_claim(std::span<PageId> pages) {
  if (pages.size() > num_free_) {
    return false;
  }
  for (PageId& page : pages) {
    const std::size_t lowest = lowest_free();
    mark(lowest, false);
    page = PageId{static_cast<std::uint32_t>(lowest)};
  }
  num_free_ -= pages.size();
  return true;
}

void PagePool::release(std::span<const PageId> pages) {
  for (const PageId page : pages) {
    if (page.value >= num_pages_ || is_free(page)) {
      throw std::logic_error("page " + std::to_string(page.value) + " is released but not claimed");
    }
    mark(page.value, true);
    ++num_free_;
  }
}

bool PagePool::is_free(PageId page) const {
  return ((levels_[0][page.value / kWordBits] >> (page.value % kWordBits)) & 1U) != 0;
}

std::size_t PagePool::lowest_free() const {
  std::size_t index = 0;
  for (std::size_t level = levels_.size(); level-- > 0;) {
    index = index * kWordBits + static_cast<std::size_t>(std::countr_zero(levels_[level][index]));
  }
  return index;
}

void PagePool::mark(std::size_t page, bool free) {
  std::size_t index = page;
  for (std::vector<std::uint64_t>& level : levels_) {
    std::uint64_t& word = level[index / kWordBits];
    const std::uint64_t bit = std::uint64_t{1} << (index % kWordBits);
    const bool had_any = word != 0;
    word = free ? word | bit : word & ~bit;
    if (had_any == (word != 0)) {
      return;
    }
    index /= kWordBits;
  }
}

}  // namespace pagedlora
