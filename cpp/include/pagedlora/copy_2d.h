// Copies rectangles of weights into one or two places, casting on the way: the CPU executor's
// inner step.
//
// The bits of the result are those of dtype.h's widen and narrow for every pair of types and every
// variant; equal types are copied byte for byte.
//
// Pure function; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"

namespace pagedlora {

struct Copy2d {
  const std::byte* source = nullptr;
  std::size_t source_stride_bytes = 0;  // between rows
  std::byte* target = nullptr;          // rows lie back to back: [rows, row_elements]
  std::byte* second_target = nullptr;   // null, or filled with the same bytes in the same pass
  std::size_t rows = 0;
  std::size_t row_elements = 0;
};

// Executes the copies in order. Large outputs bypass the caches, and are complete on return: one
// call for many small copies is cheaper than many calls.
//
// Returns false if a finite value overflowed float16; the targets then hold infinities there.
// Sources and targets must not overlap; a source needs no alignment beyond its bytes.
[[nodiscard]] bool copy_2d(std::span<const Copy2d> copies, Dtype source_dtype, Dtype target_dtype,
                           Isa isa = default_isa());

[[nodiscard]] inline bool copy_2d(const Copy2d& copy, Dtype source_dtype, Dtype target_dtype,
                                  Isa isa = default_isa()) {
  return copy_2d(std::span(&copy, 1), source_dtype, target_dtype, isa);
}

// target[column, row] of [columns, target_stride elements], and the same of second_target, becomes
// source[row, column]. For embeddings: plain loops, not tuned.
struct Transpose2d {
  const std::byte* source = nullptr;
  std::size_t source_stride_bytes = 0;  // between rows
  std::byte* target = nullptr;
  std::byte* second_target = nullptr;  // null, or filled with the same bytes
  std::size_t target_stride = 0;       // elements between columns of the source
  std::size_t rows = 0;
  std::size_t columns = 0;
};

// Returns as copy_2d does.
[[nodiscard]] bool transpose_2d(const Transpose2d& copy, Dtype source_dtype, Dtype target_dtype);

}  // namespace pagedlora
