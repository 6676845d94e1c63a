// The loop of every checksum kernel, for one width of registers. In an unnamed namespace: sources
// that are compiled for a larger instruction set keep their copy to themselves.
#pragma once

#include "internal/checksum.h"

namespace pagedlora::internal {
namespace {

// `Vector`: a vector type of 64-bit words that fills a register.
template <class Vector>
void add_checksum_lines(const std::byte* from, std::size_t num_lines, ChecksumSums& into) {
  constexpr std::size_t kVectors = kChecksumLineBytes / sizeof(Vector);
  // Arrays of the loop's own and loops of a known length: they stay in registers.
  Vector sums[kVectors];
  Vector weighted[kVectors];
  __builtin_memcpy(sums, into.sums, kChecksumLineBytes);
  __builtin_memcpy(weighted, into.weighted, kChecksumLineBytes);
  for (std::size_t line = 0; line < num_lines; ++line, from += kChecksumLineBytes) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kVectors; ++i) {
      Vector words;
      __builtin_memcpy(&words, from + i * sizeof(Vector), sizeof(Vector));
      sums[i] += words ^ (words >> 17);
      weighted[i] += sums[i];
    }
  }
  __builtin_memcpy(into.sums, sums, kChecksumLineBytes);
  __builtin_memcpy(into.weighted, weighted, kChecksumLineBytes);
}

}  // namespace
}  // namespace pagedlora::internal
