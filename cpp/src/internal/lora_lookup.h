// The first step of LoRA on an embedding: columns of A for tokens.
//
// Pure function; thread-safe.
#pragma once

#include <cstdint>

#include "pagedlora/layout.h"

namespace pagedlora::internal {

// t[row, r] = a[token - vocabulary.offset, r] for the block's ranks. Rows whose token is outside of
// the vocabulary, and lanes from the block's rank_count on, stay as they are.
struct LookUpArgs {
  const TaskPages* task = nullptr;
  const Block* block = nullptr;
  const std::int64_t* token_ids = nullptr;  // [num_rows]
  std::uint32_t num_rows = 0;
  FeatureRange vocabulary = {};  // of the row
  float* t = nullptr;            // [num_rows, kRankLanes]
};

void look_up(const LookUpArgs& args);

}  // namespace pagedlora::internal
