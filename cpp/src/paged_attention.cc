#include "pagedlora/paged_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "internal/attention_addressing.h"
#include "internal/attention_kernels.h"
#include "internal/attention_passes.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::row_of;
using internal::SlotCursor;
using std::int64_t;
using std::size_t;

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr std::int32_t kMaxHeads = 1 << 16;  // and head dims: passes count in int

void require(bool condition, const char* problem) {
  if (!condition) {
    throw InvalidArgumentError(std::string("paged attention: ") + problem);
  }
}

void check_sequence(const AttentionBatch::Sequence& sequence, int64_t block_size) {
  require(sequence.past_tokens >= 0, "past_tokens is negative");
  require(sequence.new_tokens > 0, "new_tokens must be at least 1");
  require(sequence.past_tokens <= kInt64Max - sequence.new_tokens, "too many tokens");
  const int64_t tokens = sequence.past_tokens + sequence.new_tokens;
  const int64_t needed = (tokens - 1) / block_size + 1;
  const auto given = static_cast<int64_t>(sequence.blocks.size());
  if (given < needed) {
    throw InvalidArgumentError("paged attention: a block table of " + std::to_string(given) +
                               " blocks of " + std::to_string(block_size) +
                               " tokens is too short for " + std::to_string(tokens) + " tokens");
  }
}

void check_sizes(const AttentionArgs& args) {
  require(args.num_heads > 0 && args.num_kv_heads > 0, "head counts must be positive");
  require(args.num_heads <= kMaxHeads, "more than 65536 heads");
  require(args.num_heads % args.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require(args.key_dim > 0 && args.value_dim > 0, "head dims must be positive");
  require(args.key_dim <= kMaxHeads && args.value_dim <= kMaxHeads, "a head dim above 65536");
  require(args.num_blocks >= 0, "num_blocks is negative");
  require(args.sliding_window >= 0, "sliding_window is negative");
  require(args.softcap >= 0.0F, "softcap is negative or not a number");
}

void check_pointers(const AttentionArgs& args) {
  require(args.query.data != nullptr, "query is null");
  require(args.key.data != nullptr, "key is null");
  require(args.value.data != nullptr, "value is null");
  require(args.output != nullptr, "output is null");
  require(args.key_cache != nullptr, "key_cache is null");
  require(args.value_cache != nullptr, "value_cache is null");
}

void check_blocks(const AttentionBatch& batch, const AttentionArgs& args) {
  const int64_t num_blocks = args.num_blocks;
  const int64_t token_bytes =
      int64_t{args.num_kv_heads} * std::max(args.key_dim, args.value_dim) * 4;
  require(num_blocks <= kInt64Max / token_bytes / batch.block_size(), "the cache is too large");
  for (const AttentionBatch::Sequence& sequence : batch.sequences()) {
    for (const std::int32_t block : sequence.blocks) {
      if (block < 0 || block >= num_blocks) {
        throw InvalidArgumentError("paged attention: block " + std::to_string(block) +
                                   " is outside of a cache of " + std::to_string(num_blocks) +
                                   " blocks");
      }
    }
  }
}

// Copies the heads of one token to where the cache keeps that token.
void write_token(const HeadsView& view, int64_t token, int64_t num_heads, size_t row_bytes,
                 size_t bytes, std::byte* to) {
  for (int64_t head = 0; head < num_heads; ++head, to += row_bytes) {
    std::memcpy(to, row_of(view, head, token, bytes), row_bytes);
  }
}

void write_cache(const AttentionBatch& batch, const AttentionArgs& args) {
  const size_t bytes = element_bytes(args.dtype);
  const size_t key_bytes = static_cast<size_t>(args.key_dim) * bytes;
  const size_t value_bytes = static_cast<size_t>(args.value_dim) * bytes;
  auto* keys = static_cast<std::byte*>(args.key_cache);
  auto* values = static_cast<std::byte*>(args.value_cache);
  int64_t token = 0;
  for (const AttentionBatch::Sequence& sequence : batch.sequences()) {
    SlotCursor cursor(sequence, batch.block_size(), sequence.past_tokens);
    for (int64_t i = 0; i < sequence.new_tokens; ++i, ++token) {
      const auto row = static_cast<size_t>(cursor.next() * args.num_kv_heads);
      write_token(args.key, token, args.num_kv_heads, key_bytes, bytes, keys + row * key_bytes);
      write_token(args.value, token, args.num_kv_heads, value_bytes, bytes,
                  values + row * value_bytes);
    }
  }
}

}  // namespace

AttentionBatch::AttentionBatch(std::vector<Sequence> sequences, std::int64_t block_size)
    : sequences_(std::move(sequences)), block_size_(block_size) {
  require(block_size_ >= 1, "block_size must be at least 1");
  for (const Sequence& sequence : sequences_) {
    check_sequence(sequence, block_size_);
    require(num_tokens_ <= kInt64Max - sequence.new_tokens, "too many tokens");
    num_tokens_ += sequence.new_tokens;
  }
}

PagedAttention::PagedAttention(Isa isa) : isa_(isa) {
  require(isa <= best_isa(), "this processor or build cannot run that instruction set");
}

void PagedAttention::run(const AttentionBatch& batch, const AttentionArgs& args) {
  check_sizes(args);
  if (batch.num_tokens() == 0) {
    return;
  }
  check_pointers(args);
  check_blocks(batch, args);
  const internal::AttentionPasses passes(batch, args, internal::attention_kernels(isa_, args.dtype),
                                         scratch_);
  write_cache(batch, args);
  passes.run();
}

}  // namespace pagedlora
