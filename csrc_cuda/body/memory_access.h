// Loads and stores of elements and of 16 bytes at a time, free of aliasing and alignment faults.
//
// Pure functions; thread-safe for distinct targets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

inline constexpr std::size_t kVectorBytes = 16;  // the widest access of a thread

// kAlignment: what `from` is known to be a multiple of.
template <class T, std::size_t kAlignment = alignof(T)>
PAGEDLORA_HOST_DEVICE inline T load(const std::byte* from) {
  T value;
  __builtin_memcpy(&value, __builtin_assume_aligned(from, kAlignment), sizeof(T));
  return value;
}

template <class T, std::size_t kAlignment = alignof(T)>
PAGEDLORA_HOST_DEVICE inline void store(std::byte* to, const T& value) {
  __builtin_memcpy(__builtin_assume_aligned(to, kAlignment), &value, sizeof(T));
}

// Some elements that are moved together.
template <class T, std::size_t kCount>
struct Pack {
  static constexpr std::size_t kBytes = kCount * sizeof(T);
  static constexpr std::size_t kAlignment = kBytes < kVectorBytes ? kBytes : kVectorBytes;

  alignas(kAlignment) T values[kCount];
};

PAGEDLORA_HOST_DEVICE inline bool is_multiple(const void* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

}  // namespace pagedlora::cuda
