#include "pagedlora/cuda/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace pagedlora::cuda {
namespace {

// Claims of nothing get an offset of their own, too.
std::size_t rounded(std::size_t bytes) {
  constexpr std::size_t kAlignment = RangeAllocator::kAlignment;
  return std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

RangeAllocator::RangeAllocator(std::size_t begin, std::size_t bytes) {
  if (bytes >= kAlignment) {
    free_.emplace(begin, bytes);
  }
}

std::optional<std::size_t> RangeAllocator::try_claim(std::size_t bytes) {
  const std::size_t needed = rounded(bytes);
  const auto place =
      std::ranges::find_if(free_, [&](const auto& range) { return range.second >= needed; });
  if (place == free_.end()) {
    return std::nullopt;
  }
  const auto [offset, available] = *place;
  free_.erase(place);
  if (available > needed) {
    free_.emplace(offset + needed, available - needed);
  }
  return offset;
}

void RangeAllocator::release(std::size_t offset, std::size_t bytes) {
  auto range = free_.emplace(offset, rounded(bytes)).first;
  const auto next = std::next(range);
  if (next != free_.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range != free_.begin()) {
    const auto previous = std::prev(range);
    if (previous->first + previous->second == range->first) {
      previous->second += range->second;
      free_.erase(range);
    }
  }
}

std::size_t RangeAllocator::free_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [offset, available] : free_) {
    bytes += available;
  }
  return bytes;
}

}  // namespace pagedlora::cuda
