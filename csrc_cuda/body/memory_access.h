// Loads and stores of elements and of 16 bytes at a time, free of aliasing and alignment faults.
//
// Kernels use them for memory of the device alone, never for shared memory or a thread's own. There
// they are spelt out word by word: a copy of 32 bytes whose alignment is merely assumed becomes 32
// loads of a byte each.
//
// Pure functions; thread-safe for distinct targets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

inline constexpr std::size_t kVectorBytes = 16;  // the widest access of a thread

#if defined(__CUDA_ARCH__)

namespace internal {

template <std::size_t kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = unsigned char;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

constexpr std::size_t word_bytes(std::size_t size, std::size_t alignment) {
  std::size_t bytes = kVectorBytes;
  while (size % bytes != 0 || alignment % bytes != 0) {
    bytes /= 2;
  }
  return bytes;
}

template <class T, std::size_t kAlignment>
using Word = typename WordOf<word_bytes(sizeof(T), kAlignment)>::Type;

}  // namespace internal

template <class T, std::size_t kAlignment = alignof(T)>
__device__ inline T load(const std::byte* from) {
  using Word = internal::Word<T, kAlignment>;
  __builtin_assume(__isGlobal(from));
  Word words[sizeof(T) / sizeof(Word)];
  PAGEDLORA_UNROLL
  for (std::size_t i = 0; i < sizeof(T) / sizeof(Word); ++i) {
    words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  T value;
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

template <class T, std::size_t kAlignment = alignof(T)>
__device__ inline void store(std::byte* to, const T& value) {
  using Word = internal::Word<T, kAlignment>;
  __builtin_assume(__isGlobal(to));
  Word words[sizeof(T) / sizeof(Word)];
  __builtin_memcpy(words, &value, sizeof(T));
  PAGEDLORA_UNROLL
  for (std::size_t i = 0; i < sizeof(T) / sizeof(Word); ++i) {
    reinterpret_cast<Word*>(to)[i] = words[i];
  }
}

#else

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

#endif

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
