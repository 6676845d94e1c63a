// Attention on the CPU for one ragged row of many requests, over a paged KV cache.
//
// AttentionBatch is the table of one step: for each sequence its block table, how many tokens it
// already has in the cache and how many new ones the row carries. PagedAttention::run first
// writes the new keys and values into the cache, then attends: query i of a sequence (position
// past + i) sees keys 0..past+i, or only the last `sliding_window` of them.
//
// Arithmetic: scores and outputs are accumulated in float32 in a fixed order that depends only on
// the position and the sizes, so a token's result does not depend on which tokens share the row or
// on how a prompt was cut into chunks.
//
// AttentionBatch: immutable after construction. PagedAttention: thread-compatible (owns scratch).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"

namespace pagedlora {

class AttentionBatch {
 public:
  struct Sequence {
    std::vector<std::int32_t> blocks;  // block ids, in order; covers past + new tokens
    std::int64_t past_tokens = 0;
    std::int64_t new_tokens = 0;
  };

  // Throws InvalidArgumentError if block_size < 1, a count is negative, new_tokens is 0 or a block
  // table is too short for past + new tokens.
  AttentionBatch(std::vector<Sequence> sequences, std::int64_t block_size);

  std::span<const Sequence> sequences() const { return sequences_; }
  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_tokens() const { return num_tokens_; }  // new tokens of all sequences

 private:
  std::vector<Sequence> sequences_;
  std::int64_t block_size_;
  std::int64_t num_tokens_ = 0;
};

// A [heads, tokens, dim] view of the row's queries, keys or values: element strides, dim
// contiguous.
struct HeadsView {
  const void* data = nullptr;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

struct AttentionArgs {
  HeadsView query;
  HeadsView key;
  HeadsView value;
  void* output = nullptr;       // [tokens, num_heads, value_dim], contiguous
  void* key_cache = nullptr;    // [num_blocks, block_size, num_kv_heads, key_dim], contiguous
  void* value_cache = nullptr;  // [num_blocks, block_size, num_kv_heads, value_dim], contiguous
  std::int64_t num_blocks = 0;  // of the caches; block ids are checked against it
  std::int32_t num_heads =
      0;  // a multiple of num_kv_heads; head h reads kv head h / (num_heads/num_kv_heads)
  std::int32_t num_kv_heads = 0;
  std::int32_t key_dim = 0;
  std::int32_t value_dim = 0;
  float scaling = 1.0F;
  std::int64_t sliding_window = 0;  // 0: none; key j is seen by query i when i - j < sliding_window
  float softcap = 0.0F;             // 0: none; s = softcap * tanh(s / softcap), after scaling
  const float* sinks =
      nullptr;  // [num_heads] or null: an extra logit per head in the softmax's denominator
  Dtype dtype = Dtype::float32;  // of everything but the sinks
};

class PagedAttention {
 public:
  explicit PagedAttention(Isa isa = default_isa());

  // Throws InvalidArgumentError for sizes that do not fit together or a block id out of range,
  // before anything is written.
  void run(const AttentionBatch& batch, const AttentionArgs& args);

 private:
  Isa isa_;
  std::vector<float> scratch_;
};

}  // namespace pagedlora
