// The order of the work of PagedAttention::run, once the new keys and values are in the cache.
//
// The row is cut into passes: some new tokens of one sequence and some of its kv heads, small
// enough that their state stays in the processor's cache. A pass walks the tiles of keys that its
// tokens see, in ascending order.
//
// Thread-compatible; refers to the batch, the arguments and the scratch memory it was made with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "internal/attention_kernels.h"
#include "pagedlora/paged_attention.h"

namespace pagedlora::internal {

class AttentionPasses {
 public:
  // Grows the scratch memory if need be. The batch and the arguments have been checked.
  AttentionPasses(const AttentionBatch& batch, const AttentionArgs& args,
                  const AttentionKernels& kernels, std::vector<float>& scratch);

  void run() const;

 private:
  struct Pass {
    std::size_t sequence;
    std::int64_t row_start;  // first row of the sequence
    std::int64_t first_new;  // first of its new tokens in this pass
    int num_tokens;
    int first_head;  // kv heads
    int num_heads;
  };

  // Keys that some query of a pass sees: [first, end) of one tile.
  struct Tile {
    std::int64_t position;  // of the tile's first key; a multiple of kKeyTile
    int first;
    int end;
    std::int64_t slots[kKeyTile];
  };

  struct KeyRange {
    int first;
    int end;
    bool operator==(const KeyRange&) const = default;
  };

  const AttentionBatch::Sequence& sequence_of(const Pass& pass) const {
    return batch_.sequences()[pass.sequence];
  }
  std::int64_t first_position(const Pass& pass) const {
    return sequence_of(pass).past_tokens + pass.first_new;
  }
  // Rows of one kv head are consecutive: token by token, the group's query heads within.
  int first_row(const Pass& pass, int head) const { return head * pass.num_tokens * group_; }

  void fit(Pass& pass) const;  // sets num_tokens and num_heads
  bool advance(Pass& pass) const;

  Tile make_tile(const Pass& pass, std::int64_t position) const;
  std::int64_t first_visible(std::int64_t position) const;
  KeyRange visible(std::int64_t position, const Tile& tile) const;

  void attend(const Pass& pass) const;
  void start_head(const Pass& pass, int head) const;
  void attend_tile(const Pass& pass, const Tile& tile, int head) const;
  void attend_rows(int first_row, int num_rows, KeyRange range) const;
  void finish_head(const Pass& pass, int head) const;
  void unpack(const Tile& tile, int kv_head) const;

  const AttentionBatch& batch_;
  const AttentionArgs& args_;
  const AttentionKernels& kernels_;
  std::size_t key_bytes_;    // of one head of one token
  std::size_t value_bytes_;  // likewise
  int group_;                // query heads per kv head
  int key_dim_;              // padded to kLanes
  int value_dim_;            // likewise

  float* queries_;  // [rows, key_dim_]
  float* outputs_;  // [rows, value_dim_], not yet divided by the sums
  float* scores_;   // [rows, kKeyTile]
  float* sums_;     // [rows, kLanes]
  float* maximum_;  // [rows]
  float* rescale_;  // [rows]
  float* keys_;     // [key_dim_, kKeyTile]
  float* values_;   // [kKeyTile, value_dim_]
};

}  // namespace pagedlora::internal
