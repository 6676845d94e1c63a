// Asks memory for the weights that a LoRA kernel will read next.
//
// Always inlined, so that it may be used by sources that are compiled for other processors too.
#pragma once

#include <cstddef>

#include "lora_kernels.h"

namespace pagedlora::internal {

// Moves `ahead` on by `bytes`, or to the next part: what runs over the end of a part is not
// carried over, because kernels also read parts in steps that end with the part.
[[gnu::always_inline]] inline void read_ahead(ReadAhead& ahead, std::size_t bytes) {
  constexpr std::size_t kLineBytes = 64;
  if (ahead.part == ahead.end) {
    return;
  }
  const char* from = static_cast<const char*>(ahead.part->at) + ahead.offset;
#pragma GCC unroll 8
  for (std::size_t line = 0; line < bytes; line += kLineBytes) {
    __builtin_prefetch(from + line, 0, 2);
  }
  ahead.offset += bytes;
  if (ahead.offset >= ahead.part->bytes) {
    ++ahead.part;
    ahead.offset = 0;
  }
}

}  // namespace pagedlora::internal
