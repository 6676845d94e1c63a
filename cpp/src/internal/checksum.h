// A fast checksum of bytes that pass through the cache: tells whether a source still holds what it
// held at its first read. No protection against an attacker.
//
// Eight lanes of multiply and xor, so that it runs at the speed of the second-level cache. Any
// change within one word changes it: every step is a bijection of its lane.
//
// Thread-compatible.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace pagedlora::internal {

class Checksum {
 public:
  // Depends on the pieces in which the bytes are given.
  void update(std::span<const std::byte> bytes) {
    std::size_t at = 0;
    for (; at + kLanes * kWordBytes <= bytes.size(); at += kLanes * kWordBytes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        absorb(lane, bytes.data() + at + lane * kWordBytes, kWordBytes);
      }
    }
    for (std::size_t lane = 0; at < bytes.size(); ++lane) {
      const std::size_t left = bytes.size() - at < kWordBytes ? bytes.size() - at : kWordBytes;
      absorb(lane, bytes.data() + at, left);
      at += left;
    }
    lanes_[0] = (lanes_[0] ^ bytes.size()) * kFactor;
  }

  std::uint64_t value() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t lane : lanes_) {
      sum = std::rotl((sum ^ lane ^ (lane >> 32)) * kFactor, 29);
    }
    return sum;
  }

 private:
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kWordBytes = 8;
  static constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd: multiplying loses nothing

  void absorb(std::size_t lane, const std::byte* from, std::size_t bytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, bytes);
    const std::uint64_t mixed = (lanes_[lane] ^ word) * kFactor;
    lanes_[lane] = mixed ^ (mixed >> 47);
  }

  std::uint64_t lanes_[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
};

}  // namespace pagedlora::internal
