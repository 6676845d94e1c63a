// A fast checksum of bytes that pass through the cache: tells whether a source still holds what it
// held at its first read. No protection against an attacker.
//
// In the manner of Fletcher's: in each of eight lanes the sum of the words, and the sum of those
// sums, in which a word counts as often as lines follow it; both modulo 2^64. So any change within
// one word changes it, and of two words only one that leaves the low 52 bits of both as they are
// could not. A word's high bits are spread first: else the sign of every other float32 would move
// nothing but the top bit of a sum, and an even number of them nothing at all.
//
// Every instruction set gives the same value. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagedlora/cpu_features.h"

namespace pagedlora::internal {

inline constexpr std::size_t kChecksumLanes = 8;
inline constexpr std::size_t kChecksumLineBytes = kChecksumLanes * sizeof(std::uint64_t);

struct ChecksumSums {
  std::uint64_t sums[kChecksumLanes] = {};      // of all words
  std::uint64_t weighted[kChecksumLanes] = {};  // of all words, each as often as lines follow it
};

// Adds whole lines.
using ChecksumKernel = void (*)(const std::byte* from, std::size_t num_lines, ChecksumSums& into);

class Checksum {
 public:
  explicit Checksum(Isa isa = default_isa());  // one that this processor runs

  // Depends on the pieces in which the bytes are given.
  void update(std::span<const std::byte> bytes);

  // The same in steps: whole lines of a piece as they come, then all of it.
  class Piece {
   public:
    Piece(Checksum& checksum, std::span<const std::byte> bytes)
        : checksum_(checksum), bytes_(bytes) {}
    // With the lines that end at or before `end`, in bytes from the piece's first; those that were
    // added before stay so.
    void add_up_to(std::size_t end);
    void finish();

   private:
    Checksum& checksum_;
    std::span<const std::byte> bytes_;
    std::size_t done_ = 0;
  };
  std::uint64_t value() const;

 private:
  ChecksumKernel kernel_;
  ChecksumSums sums_;
};

void portable_checksum_kernel(const std::byte* from, std::size_t num_lines, ChecksumSums& into);
#if defined(PAGEDLORA_HAVE_AVX2)
void avx2_checksum_kernel(const std::byte* from, std::size_t num_lines, ChecksumSums& into);
#endif

}  // namespace pagedlora::internal
