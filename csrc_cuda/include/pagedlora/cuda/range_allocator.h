// Pieces of a range of offsets, first fit; freed neighbours become one.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace pagedlora::cuda {

class RangeAllocator {
 public:
  static constexpr std::size_t kAlignment = 16;

  // Hands out offsets in [begin, begin + bytes), which must be multiples of kAlignment.
  RangeAllocator(std::size_t begin, std::size_t bytes);

  // The lowest place for so many bytes, a multiple of kAlignment; nothing if there is none.
  std::optional<std::size_t> try_claim(std::size_t bytes);

  // Frees what try_claim(bytes) returned. It must not have been freed already.
  void release(std::size_t offset, std::size_t bytes);

  std::size_t free_bytes() const;

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
};

}  // namespace pagedlora::cuda
