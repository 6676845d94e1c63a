// What the tests of PagedAttention share: requests with random tokens, a paged cache, a float64
// reference, and a way to run a row of pieces of requests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"
#include "pagedlora/paged_attention.h"

namespace pagedlora::attention_test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  int num_heads = 4;
  int num_kv_heads = 2;
  int key_dim = 16;
  int value_dim = 16;
  int block_size = 4;
  std::int64_t window = 0;
  float softcap = 0.0F;
  bool with_sinks = false;
  Dtype dtype = Dtype::float32;
};

inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << dtype_name(shape.dtype) << " heads " << shape.num_heads << '/' << shape.num_kv_heads
             << " dims " << shape.key_dim << ',' << shape.value_dim << " block " << shape.block_size
             << " window " << shape.window << " softcap " << shape.softcap << " sinks "
             << shape.with_sinks;
}

// A row of elements of any dtype.
class Elements {
 public:
  Elements() = default;
  Elements(Dtype dtype, std::size_t count) : dtype_(dtype), bytes_(count * element_bytes(dtype)) {}

  void set(std::size_t i, float value) {
    if (dtype_ == Dtype::float32) {
      put(i, value);
    } else if (dtype_ == Dtype::float16) {
      put(i, narrow<Float16>(value));
    } else {
      put(i, narrow<Bfloat16>(value));
    }
  }

  float get(std::size_t i) const {
    return dtype_ == Dtype::float32   ? at<float>(i)
           : dtype_ == Dtype::float16 ? widen(at<Float16>(i))
                                      : widen(at<Bfloat16>(i));
  }

  std::byte* data() { return bytes_.data(); }
  const std::byte* data() const { return bytes_.data(); }
  std::byte* at_element(std::size_t i) { return data() + i * element_bytes(dtype_); }
  const std::byte* at_element(std::size_t i) const { return data() + i * element_bytes(dtype_); }
  std::size_t size() const { return bytes_.size() / element_bytes(dtype_); }
  bool operator==(const Elements& other) const { return bytes_ == other.bytes_; }

 private:
  template <class T>
  void put(std::size_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }
  template <class T>
  T at(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }

  Dtype dtype_ = Dtype::float32;
  std::vector<std::byte> bytes_;
};

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// One request's whole history: token-major [tokens, heads, dim] queries, keys and values.
struct Story {
  Elements query, key, value;
  std::int64_t tokens;
};

inline Story make_story(const Shape& shape, std::int64_t tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto filled = [&](int heads, int dim) {
    Elements elements(shape.dtype, index(tokens * heads * dim));
    for (std::size_t i = 0; i < elements.size(); ++i) {
      elements.set(i, normal(random));
    }
    return elements;
  };
  return {filled(shape.num_heads, shape.key_dim), filled(shape.num_kv_heads, shape.key_dim),
          filled(shape.num_kv_heads, shape.value_dim), tokens};
}

inline std::vector<float> make_sinks(const Shape& shape) {
  std::vector<float> sinks(index(shape.num_heads));
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    sinks[i] = static_cast<float>(i % 5) - 2.0F;
  }
  return sinks;
}

inline float scaling_of(const Shape& shape) {
  return 1.5F / std::sqrt(static_cast<float>(shape.key_dim));
}

// Attention of one head of one token in float64; also the bound of what rounding may change.
inline std::vector<double> reference(const Shape& shape, const Story& story, std::int64_t position,
                                     int head) {
  const int kv_head = head / (shape.num_heads / shape.num_kv_heads);
  std::vector<double> logits, result(index(shape.value_dim), 0.0);
  const std::int64_t first =
      shape.window == 0 ? 0 : std::max<std::int64_t>(0, position - shape.window + 1);
  for (std::int64_t j = first; j <= position; ++j) {
    double dot = 0.0;
    for (int d = 0; d < shape.key_dim; ++d) {
      dot +=
          double{story.query.get(index((position * shape.num_heads + head) * shape.key_dim + d))} *
          double{story.key.get(index((j * shape.num_kv_heads + kv_head) * shape.key_dim + d))};
    }
    double score = dot * double{scaling_of(shape)};
    if (shape.softcap > 0.0F) {
      score = double{shape.softcap} * std::tanh(score / double{shape.softcap});
    }
    logits.push_back(score);
  }
  double total = shape.with_sinks ? std::exp(double{make_sinks(shape)[index(head)]}) : 0.0;
  for (const double logit : logits) {
    total += std::exp(logit);
  }
  for (std::int64_t j = first; j <= position; ++j) {
    const double weight = std::exp(logits[index(j - first)]) / total;
    for (int d = 0; d < shape.value_dim; ++d) {
      result[index(d)] +=
          weight *
          double{story.value.get(index((j * shape.num_kv_heads + kv_head) * shape.value_dim + d))};
    }
  }
  return result;
}

// A cache whose blocks are handed out in shuffled order, filled with NaN where nothing was written.
class Cache {
 public:
  Cache(const Shape& shape, std::int64_t num_blocks, unsigned seed = 3)
      : shape_(shape),
        num_blocks_(num_blocks),
        keys(shape.dtype,
             index(num_blocks * shape.block_size * shape.num_kv_heads * shape.key_dim)),
        values(shape.dtype,
               index(num_blocks * shape.block_size * shape.num_kv_heads * shape.value_dim)),
        free_blocks_(index(num_blocks)) {
    std::memset(keys.data(), 0xFF, keys.size() * element_bytes(shape.dtype));
    std::memset(values.data(), 0xFF, values.size() * element_bytes(shape.dtype));
    std::iota(free_blocks_.begin(), free_blocks_.end(), 0);
    std::mt19937 random(seed);
    std::shuffle(free_blocks_.begin(), free_blocks_.end(), random);
  }

  std::vector<std::int32_t> claim(std::int64_t tokens) {
    std::vector<std::int32_t> blocks;
    for (std::int64_t i = 0; i < tokens; i += shape_.block_size) {
      blocks.push_back(free_blocks_.back());
      free_blocks_.pop_back();
    }
    return blocks;
  }

  std::int64_t num_blocks() const { return num_blocks_; }

 private:
  Shape shape_;
  std::int64_t num_blocks_;

 public:
  Elements keys, values;

 private:
  std::vector<std::int32_t> free_blocks_;
};

// The next new_tokens tokens of a story, in one row with others.
struct Piece {
  const Story* story;
  std::vector<std::int32_t> blocks;
  std::int64_t past;
  std::int64_t count;
};

inline AttentionBatch make_batch(const Shape& shape, const std::vector<Piece>& pieces) {
  std::vector<AttentionBatch::Sequence> sequences;
  for (const Piece& piece : pieces) {
    sequences.push_back({piece.blocks, piece.past, piece.count});
  }
  return AttentionBatch(std::move(sequences), shape.block_size);
}

// The row's tensor [heads, tokens, dim] inside a larger one, so that strides are not the obvious
// ones.
inline Elements make_row(const Shape& shape, const std::vector<Piece>& pieces,
                         Elements Story::* member, int heads, int dim, bool heads_first,
                         HeadsView& view) {
  std::int64_t tokens = 0;
  for (const Piece& piece : pieces) {
    tokens += piece.count;
  }
  view.token_stride = heads_first ? dim + 3 : heads * dim + 5;
  view.head_stride = heads_first ? tokens * (dim + 3) : dim;
  Elements row(shape.dtype, index(heads * tokens * (dim + 3) + tokens * 5));
  std::int64_t token = 0;
  for (const Piece& piece : pieces) {
    for (std::int64_t i = 0; i < piece.count; ++i, ++token) {
      for (int head = 0; head < heads; ++head) {
        const auto from = index(((piece.past + i) * heads + head) * dim);
        std::memcpy(row.at_element(index(head * view.head_stride + token * view.token_stride)),
                    (piece.story->*member).at_element(from),
                    index(dim) * element_bytes(shape.dtype));
      }
    }
  }
  view.data = row.data();
  return row;
}

// Runs one row and returns its output.
inline Elements run_row(const Shape& shape, Cache& cache, const std::vector<Piece>& pieces, Isa isa,
                        bool heads_first = false) {
  const AttentionBatch batch = make_batch(shape, pieces);
  AttentionArgs args;
  const Elements query = make_row(shape, pieces, &Story::query, shape.num_heads, shape.key_dim,
                                  heads_first, args.query);
  const Elements key = make_row(shape, pieces, &Story::key, shape.num_kv_heads, shape.key_dim,
                                heads_first, args.key);
  const Elements value = make_row(shape, pieces, &Story::value, shape.num_kv_heads, shape.value_dim,
                                  heads_first, args.value);
  Elements output(shape.dtype, index(batch.num_tokens() * shape.num_heads * shape.value_dim));
  const std::vector<float> sinks = make_sinks(shape);
  args.output = output.data();
  args.key_cache = cache.keys.data();
  args.value_cache = cache.values.data();
  args.num_blocks = cache.num_blocks();
  args.num_heads = shape.num_heads;
  args.num_kv_heads = shape.num_kv_heads;
  args.key_dim = shape.key_dim;
  args.value_dim = shape.value_dim;
  args.scaling = scaling_of(shape);
  args.sliding_window = shape.window;
  args.softcap = shape.softcap;
  args.sinks = shape.with_sinks ? sinks.data() : nullptr;
  args.dtype = shape.dtype;
  PagedAttention(isa).run(batch, args);
  return output;
}

// The outputs of a whole story, given in chunks to a cache of its own.
inline Elements run_in_chunks(const Shape& shape, const Story& story, std::int64_t chunk, Isa isa) {
  Cache cache(shape, story.tokens, static_cast<unsigned>(chunk));
  const std::vector<std::int32_t> blocks = cache.claim(story.tokens);
  Elements all(shape.dtype, index(story.tokens * shape.num_heads * shape.value_dim));
  for (std::int64_t past = 0; past < story.tokens; past += chunk) {
    const std::int64_t count = std::min(chunk, story.tokens - past);
    const Elements output = run_row(shape, cache, {{&story, blocks, past, count}}, isa);
    std::memcpy(all.at_element(index(past * shape.num_heads * shape.value_dim)), output.data(),
                output.size() * element_bytes(shape.dtype));
  }
  return all;
}

}  // namespace pagedlora::attention_test
