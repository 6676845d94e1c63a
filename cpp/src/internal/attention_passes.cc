#include "internal/attention_passes.h"

#include <algorithm>
#include <memory>

#include "internal/attention_addressing.h"

namespace pagedlora::internal {
namespace {

using std::int64_t;
using std::ptrdiff_t;
using std::size_t;

constexpr size_t kCacheLineBytes = 64;

// Query rows (a head of a token) handled in one pass over the keys: enough to hide the cost of
// unpacking the keys, few enough for the second-level cache. A multiple of the kernels' tile.
constexpr int kTargetRows = 96;

constexpr int round_down_to_lanes(int count) { return count / kLanes * kLanes; }
constexpr int round_up_to_lanes(int count) { return round_down_to_lanes(count + kLanes - 1); }

// Hands out pieces of the scratch memory, each aligned to a cache line.
class Carver {
 public:
  explicit Carver(float* start) : next_(start) {}

  float* take(size_t count) {
    constexpr size_t kLine = kCacheLineBytes / sizeof(float);
    float* piece = next_;
    next_ += (count + kLine - 1) / kLine * kLine;
    return piece;
  }

 private:
  float* next_;
};

}  // namespace

AttentionPasses::AttentionPasses(const AttentionBatch& batch, const AttentionArgs& args,
                                 const AttentionKernels& kernels, std::vector<float>& scratch)
    : batch_(batch),
      args_(args),
      kernels_(kernels),
      key_bytes_(static_cast<size_t>(args.key_dim) * element_bytes(args.dtype)),
      value_bytes_(static_cast<size_t>(args.value_dim) * element_bytes(args.dtype)),
      group_(args.num_heads / args.num_kv_heads),
      key_dim_(round_up_to_lanes(args.key_dim)),
      value_dim_(round_up_to_lanes(args.value_dim)) {
  const auto rows = static_cast<size_t>(std::max(kTargetRows, round_up_to_lanes(group_)));
  const auto dims = static_cast<size_t>(key_dim_) + static_cast<size_t>(value_dim_);
  const size_t needed = rows * (dims + kKeyTile + kLanes + 2) + kKeyTile * dims + kLanes;
  if (scratch.size() < needed) {
    scratch.resize(needed);
  }
  void* start = scratch.data();
  size_t space = scratch.size() * sizeof(float);
  Carver carver(static_cast<float*>(std::align(kCacheLineBytes, sizeof(float), start, space)));
  queries_ = carver.take(rows * static_cast<size_t>(key_dim_));
  outputs_ = carver.take(rows * static_cast<size_t>(value_dim_));
  scores_ = carver.take(rows * kKeyTile);
  sums_ = carver.take(rows * kLanes);
  maximum_ = carver.take(rows);
  rescale_ = carver.take(rows);
  keys_ = carver.take(static_cast<size_t>(key_dim_) * kKeyTile);
  values_ = carver.take(static_cast<size_t>(value_dim_) * kKeyTile);
}

void AttentionPasses::run() const {
  Pass pass{};
  do {
    fit(pass);
    attend(pass);
  } while (advance(pass));
}

// To the next kv heads, else to the next tokens, else to the next sequence. False at the end.
bool AttentionPasses::advance(Pass& pass) const {
  pass.first_head += pass.num_heads;
  if (pass.first_head == args_.num_kv_heads) {
    pass.first_head = 0;
    pass.first_new += pass.num_tokens;
    const int64_t new_tokens = sequence_of(pass).new_tokens;
    if (pass.first_new == new_tokens) {
      pass.first_new = 0;
      pass.row_start += new_tokens;
      if (++pass.sequence == batch_.sequences().size()) {
        return false;
      }
    }
  }
  return true;
}

void AttentionPasses::fit(Pass& pass) const {
  const int64_t max_tokens = std::max(1, kTargetRows / group_);
  const int64_t tokens_left = sequence_of(pass).new_tokens - pass.first_new;
  pass.num_tokens = static_cast<int>(std::min(max_tokens, tokens_left));
  const int max_heads = std::max(1, kTargetRows / (pass.num_tokens * group_));
  pass.num_heads = std::min(max_heads, args_.num_kv_heads - pass.first_head);
}

void AttentionPasses::attend(const Pass& pass) const {
  for (int head = 0; head < pass.num_heads; ++head) {
    start_head(pass, head);
  }
  const int64_t end = first_position(pass) + pass.num_tokens;
  int64_t position = first_visible(first_position(pass)) / kKeyTile * kKeyTile;
  for (; position < end; position += kKeyTile) {
    const Tile tile = make_tile(pass, position);
    for (int head = 0; head < pass.num_heads; ++head) {
      attend_tile(pass, tile, head);
    }
  }
  for (int head = 0; head < pass.num_heads; ++head) {
    finish_head(pass, head);
  }
}

// A sink is a key of score sinks[h] and value zero that every query sees first.
void AttentionPasses::start_head(const Pass& pass, int head) const {
  int row = first_row(pass, head);
  const int first_query_head = (pass.first_head + head) * group_;
  const int64_t first_token = pass.row_start + pass.first_new;
  for (int token = 0; token < pass.num_tokens; ++token) {
    for (int i = 0; i < group_; ++i, ++row) {
      const int query_head = first_query_head + i;
      const void* query =
          row_of(args_.query, query_head, first_token + token, element_bytes(args_.dtype));
      kernels_.widen_rows(&query, 1, args_.key_dim, queries_ + ptrdiff_t{row} * key_dim_, key_dim_);
      float* output = outputs_ + ptrdiff_t{row} * value_dim_;
      std::fill(output, output + value_dim_, 0.0F);
      maximum_[row] = args_.sinks == nullptr ? kMinusInfinity : args_.sinks[query_head];
      float* sums = sums_ + row * kLanes;
      std::fill(sums, sums + kLanes, 0.0F);
      sums[0] = maximum_[row] == kMinusInfinity ? 0.0F : 1.0F;
    }
  }
}

AttentionPasses::Tile AttentionPasses::make_tile(const Pass& pass, int64_t position) const {
  Tile tile;
  tile.position = position;
  const int64_t first = std::max(position, first_visible(first_position(pass)));
  const int64_t end = std::min(position + kKeyTile, first_position(pass) + pass.num_tokens);
  tile.first = static_cast<int>(first - position);
  tile.end = static_cast<int>(end - position);
  SlotCursor cursor(sequence_of(pass), batch_.block_size(), first);
  for (int i = tile.first; i < tile.end; ++i) {
    tile.slots[i] = cursor.next();
  }
  // The kernels unpack whole groups of kLanes keys; the scores of the repeated ones are not used.
  std::fill(tile.slots + round_down_to_lanes(tile.first), tile.slots + tile.first,
            tile.slots[tile.first]);
  std::fill(tile.slots + tile.end, tile.slots + round_up_to_lanes(tile.end),
            tile.slots[tile.first]);
  return tile;
}

int64_t AttentionPasses::first_visible(int64_t position) const {
  const int64_t window = args_.sliding_window;
  return window == 0 || position < window ? 0 : position - window + 1;
}

AttentionPasses::KeyRange AttentionPasses::visible(int64_t position, const Tile& tile) const {
  const int64_t first = std::max(first_visible(position) - tile.position, int64_t{0});
  const int64_t end = std::min(position + 1 - tile.position, int64_t{kKeyTile});
  return first < end ? KeyRange{static_cast<int>(first), static_cast<int>(end)} : KeyRange{0, 0};
}

void AttentionPasses::unpack(const Tile& tile, int kv_head) const {
  const int first = round_down_to_lanes(tile.first);
  const int end = round_up_to_lanes(tile.end);
  const void* keys[kKeyTile];
  const void* values[kKeyTile];
  for (int i = first; i < end; ++i) {
    const auto row = static_cast<size_t>(tile.slots[i] * args_.num_kv_heads + kv_head);
    keys[i] = static_cast<const std::byte*>(args_.key_cache) + row * key_bytes_;
    values[i] = static_cast<const std::byte*>(args_.value_cache) + row * value_bytes_;
  }
  kernels_.pack_keys(keys + first, end - first, args_.key_dim, keys_ + first);
  kernels_.widen_rows(values + tile.first, tile.end - tile.first, args_.value_dim,
                      values_ + ptrdiff_t{tile.first} * value_dim_, value_dim_);
}

// Consecutive tokens that see the same keys of the tile are handled together.
void AttentionPasses::attend_tile(const Pass& pass, const Tile& tile, int head) const {
  unpack(tile, pass.first_head + head);
  const int row = first_row(pass, head);
  for (int token = 0; token < pass.num_tokens;) {
    const KeyRange range = visible(first_position(pass) + token, tile);
    int end = token + 1;
    while (end < pass.num_tokens && visible(first_position(pass) + end, tile) == range) {
      ++end;
    }
    if (range.first < range.end) {
      attend_rows(row + token * group_, (end - token) * group_, range);
    }
    token = end;
  }
}

void AttentionPasses::attend_rows(int row, int num_rows, KeyRange range) const {
  const int first = round_down_to_lanes(range.first);
  const int end = round_up_to_lanes(range.end);
  float* scores = scores_ + row * kKeyTile;
  kernels_.multiply({queries_ + ptrdiff_t{row} * key_dim_, key_dim_, keys_ + first, kKeyTile,
                     scores + first, kKeyTile, nullptr, num_rows, args_.key_dim, end - first});
  kernels_.softmax({scores, maximum_ + row, sums_ + row * kLanes, rescale_ + row, num_rows,
                    range.first, range.end, args_.scaling, args_.softcap});
  kernels_.multiply({scores + range.first, kKeyTile, values_ + ptrdiff_t{range.first} * value_dim_,
                     value_dim_, outputs_ + ptrdiff_t{row} * value_dim_, value_dim_, rescale_ + row,
                     num_rows, range.end - range.first, value_dim_});
}

void AttentionPasses::finish_head(const Pass& pass, int head) const {
  int row = first_row(pass, head);
  const int64_t first_query_head = int64_t{pass.first_head + head} * group_;
  const int64_t first_token = pass.row_start + pass.first_new;
  for (int token = 0; token < pass.num_tokens; ++token) {
    const int64_t first_out = (first_token + token) * args_.num_heads + first_query_head;
    auto* out =
        static_cast<std::byte*>(args_.output) + static_cast<size_t>(first_out) * value_bytes_;
    for (int i = 0; i < group_; ++i, ++row, out += value_bytes_) {
      kernels_.store_row(outputs_ + ptrdiff_t{row} * value_dim_, sums_ + row * kLanes,
                         args_.value_dim, out);
    }
  }
}

}  // namespace pagedlora::internal
