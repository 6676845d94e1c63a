// How far rounding may take an output of LoraOperator from the exact one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "lora_operator_fixture.h"
#include "pagedlora/cpu_features.h"
#include "pagedlora/layout.h"

namespace pagedlora::testing_support {

inline std::uint32_t longest(std::span<const Part> parts) {
  std::uint32_t length = 0;
  for (const Part& part : parts) {
    length = std::max(length, part.length);
  }
  return length;
}

// Roundings on the longest path of one product A[r, i] x[i] to y, times the unit roundoff of
// float32, bound the error relative to the sum of the magnitudes of all products:
//   its product, and the partial sum of its lane   ceil(length of the part / lanes) + 2
//   lanes, parts                                   4 + number of parts
//   scale, product with B, lanes of the block      1 + 1 + 3
//   blocks, y                                      number of blocks + 1
// The AVX-512 kernels add rank by rank, on a longer path, and are held to the same bound.
inline double rounding_bound(const Layout& layout, std::uint32_t row, Isa isa) {
  const double lanes = isa == Isa::avx2 ? 8 : 16;
  double longest_path = 0;
  for (const Block& block : layout.blocks_of_row(row)) {
    const double lane = std::ceil(longest(layout.a_parts(block)) / lanes) + 2;
    longest_path = std::max(longest_path, lane + 4 + block.num_a_parts);
  }
  const auto blocks = static_cast<double>(layout.blocks_of_row(row).size());
  return (longest_path + 5 + blocks + 1) * unit_roundoff(Dtype::float32) * 1.001;
}

}  // namespace pagedlora::testing_support
