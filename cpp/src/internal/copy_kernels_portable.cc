#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "internal/copy_kernels.h"

namespace pagedlora::internal {
namespace {

// Elements cast at a time, so that both targets are written from the L1 cache.
constexpr std::size_t kBlockElements = 512;
// Rows of this many elements, taken from wider ones, are what a rank block's B matrix consists of.
constexpr std::size_t kPieceElements = 8;

template <class Element>
Element load(const std::byte* from) {
  Element element;
  std::memcpy(&element, from, sizeof(element));
  return element;
}

void store(std::byte* target, std::byte* second_target, std::size_t offset, const void* from,
           std::size_t num_bytes) {
  std::memcpy(target + offset, from, num_bytes);
  if (second_target != nullptr) {
    std::memcpy(second_target + offset, from, num_bytes);
  }
}

// Returns false if a finite value overflowed.
template <class From, class To>
bool cast_block(const std::byte* from, To* into, std::size_t num_elements) {
  bool overflowed = false;
  for (std::size_t i = 0; i < num_elements; ++i) {
    const float value = widen(load<From>(from + i * sizeof(From)));
    if constexpr (std::is_same_v<To, Float16>) {
      overflowed |= overflows_float16(value);
    }
    into[i] = narrow<To>(value);
  }
  return !overflowed;
}

// Converts `num_elements` that lie back to back, and writes them at `offset` of the targets.
template <class From, class To>
bool put_run(const Copy2d& copy, const std::byte* from, std::size_t num_elements,
             std::size_t offset) {
  if constexpr (std::is_same_v<From, To>) {
    store(copy.target, copy.second_target, offset, from, num_elements * sizeof(To));
    return true;
  } else {
    std::array<To, kBlockElements> block;
    bool fits = true;
    for (std::size_t done = 0; done < num_elements; done += kBlockElements) {
      const std::size_t count = std::min(kBlockElements, num_elements - done);
      fits &= cast_block<From, To>(from + done * sizeof(From), block.data(), count);
      store(copy.target, copy.second_target, offset + done * sizeof(To), block.data(),
            count * sizeof(To));
    }
    return fits;
  }
}

// Rows of eight elements: gathered first, so that the conversion sees a long run.
template <class From, class To>
bool copy_pieces(const Copy2d& copy) {
  constexpr std::size_t kPieceBytes = kPieceElements * sizeof(From);
  constexpr std::size_t kBlockRows = kBlockElements / kPieceElements;
  std::array<std::byte, kBlockElements * sizeof(From)> gathered;
  bool fits = true;
  for (std::size_t done = 0; done < copy.rows; done += kBlockRows) {
    const std::size_t count = std::min(kBlockRows, copy.rows - done);
    const std::byte* from = copy.source + done * copy.source_stride_bytes;
    for (std::size_t row = 0; row < count; ++row) {
      std::memcpy(gathered.data() + row * kPieceBytes, from + row * copy.source_stride_bytes,
                  kPieceBytes);
    }
    fits &= put_run<From, To>(copy, gathered.data(), count * kPieceElements,
                              done * kPieceElements * sizeof(To));
  }
  return fits;
}

template <class From, class To>
bool copy_rows(const Copy2d& copy) {
  if (copy.rows == 0 || copy.row_elements == 0) {
    return true;  // there may be no memory at all
  }
  if (copy.source_stride_bytes == copy.row_elements * sizeof(From)) {
    return put_run<From, To>(copy, copy.source, copy.rows * copy.row_elements, 0);
  }
  if (copy.row_elements == kPieceElements) {
    return copy_pieces<From, To>(copy);
  }
  bool fits = true;
  for (std::size_t row = 0; row < copy.rows; ++row) {
    fits &= put_run<From, To>(copy, copy.source + row * copy.source_stride_bytes, copy.row_elements,
                              row * copy.row_elements * sizeof(To));
  }
  return fits;
}

template <class From, class To>
bool copy_all(const Copy2d* copies, std::size_t count) {
  bool fits = true;
  for (std::size_t i = 0; i < count; ++i) {
    fits &= copy_rows<From, To>(copies[i]);
  }
  return fits;
}

template <class From>
CopyKernel kernel_from(Dtype target_dtype) {
  switch (target_dtype) {
    case Dtype::float32:
      return copy_all<From, float>;
    case Dtype::float16:
      return copy_all<From, Float16>;
    case Dtype::bfloat16:
      return copy_all<From, Bfloat16>;
  }
  return nullptr;
}

}  // namespace

CopyKernel portable_copy_kernel(Dtype source_dtype, Dtype target_dtype) {
  switch (source_dtype) {
    case Dtype::float32:
      return kernel_from<float>(target_dtype);
    case Dtype::float16:
      return kernel_from<Float16>(target_dtype);
    case Dtype::bfloat16:
      return kernel_from<Bfloat16>(target_dtype);
  }
  return nullptr;
}

}  // namespace pagedlora::internal
