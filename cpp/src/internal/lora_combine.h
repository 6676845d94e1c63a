// The last step of a LoRA row that has a bias or a DoRA scale: from scale * B A x to y.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <span>

#include "pagedlora/dtype.h"
#include "pagedlora/layout.h"

namespace pagedlora::internal {

// With delta = scaled_product + scaled_bias:
//   y += delta                                                      without dora_scale
//   y += (dora_scale - 1) * (y - base_bias) + dora_scale * delta    with it
// in float32, and rounded once. What is null is absent; pointers need no alignment beyond that of
// their elements.
struct CombineArgs {
  const float* scaled_product = nullptr;  // [num_rows, length]
  std::uint32_t num_rows = 0;
  std::uint32_t length = 0;
  const float* scaled_bias = nullptr;  // [length]
  const float* dora_scale = nullptr;   // [length]
  const void* base_bias = nullptr;     // [length], activations dtype
  void* y = nullptr;                   // [num_rows, length], activations dtype
  std::int64_t y_row_stride = 0;       // in elements
};

void combine(const CombineArgs& args, Dtype activations);

// Features [begin, begin + length) of a bias or a DoRA scale, from its parts.
void copy_features(const TaskPages& task, std::span<const Part> parts, std::uint32_t begin,
                   std::uint32_t length, float* into);

}  // namespace pagedlora::internal
