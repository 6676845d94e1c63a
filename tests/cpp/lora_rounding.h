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

// Roundings of one product A[r, i] x[i] on its way into the sum of its rank.
//   its product, and the partial sum of its lane   ceil(length of the part / lanes) + 2;
//                                                  avx512: two a step, through all parts
//   lanes, parts                                   4 + number of parts (avx512: 4 + 1)
inline double longest_shrink_path(const Layout& layout, const Block& block, Isa isa) {
  const std::span<const Part> parts = layout.a_parts(block);
  if (isa != Isa::avx512) {
    const double lanes = isa == Isa::avx2 ? 8 : 16;
    return std::ceil(longest(parts) / lanes) + 2 + 4 + static_cast<double>(parts.size());
  }
  double path = 4 + 1;
  for (const Part& part : parts) {
    path += 2 * std::ceil(part.length / 32.0);
  }
  return path;
}

// Roundings on the longest path of one product A[r, i] x[i] to y, times the unit roundoff of
// float32, bound the error relative to the sum of the magnitudes of all products:
//   the sum of its rank                            longest_shrink_path
//   scale                                          1
//   product with B, lanes of the block, blocks     1 + 3 + number of blocks;
//                                                  avx512: one a rank, through all blocks
//   y                                              1
inline double rounding_bound(const Layout& layout, std::uint32_t row, Isa isa) {
  double path = 0;
  for (const Block& block : layout.blocks_of_row(row)) {
    path = std::max(path, longest_shrink_path(layout, block, isa));
  }
  const auto blocks = static_cast<double>(layout.blocks_of_row(row).size());
  path += 1 + (isa == Isa::avx512 ? kMaxBlockRanks * blocks : 1 + 3 + blocks) + 1;
  return path * unit_roundoff(Dtype::float32) * 1.001;
}

}  // namespace pagedlora::testing_support
