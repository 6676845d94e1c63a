// Times PagedAttention in the shape of SmolLM2-135M (9 heads on 3 kv heads of 64, bfloat16): a
// decode step of 16 sequences through 30 layers, and the prefill of one prompt of 2048 tokens. Each
// round runs every instruction set of this machine, and copies the same bytes of keys and values
// with memcpy. Prints medians as one line of JSON.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pagedlora/paged_attention.h"

namespace {

using pagedlora::AttentionArgs;
using pagedlora::AttentionBatch;
using pagedlora::PagedAttention;

constexpr int kHeads = 9;
constexpr int kKvHeads = 3;
constexpr int kDim = 64;
constexpr int kLayers = 30;
constexpr int kBlockSize = 16;
constexpr int kDecodeSequences = 16;
constexpr int kPromptTokens = 2048;
constexpr std::int64_t kTokenBytes = 2 * kKvHeads * kDim * 2;  // keys and values, one layer

using Elements = std::vector<std::uint16_t>;

Elements random_elements(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Elements elements(static_cast<std::size_t>(count));
  for (std::uint16_t& element : elements) {
    element = pagedlora::narrow<pagedlora::Bfloat16>(normal(random)).bits;
  }
  return elements;
}

// Processor time of this single-threaded program: a busy neighbour does not count as ours.
double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// One workload: a batch, its row of activations and a pair of caches per layer.
class Workload {
 public:
  Workload(AttentionBatch batch, std::int64_t num_blocks, int layers, std::mt19937& random)
      : batch_(std::move(batch)), num_blocks_(num_blocks) {
    const std::int64_t tokens = batch_.num_tokens();
    query_ = random_elements(tokens * kHeads * kDim, random);
    key_ = random_elements(tokens * kKvHeads * kDim, random);
    value_ = random_elements(tokens * kKvHeads * kDim, random);
    output_.resize(query_.size());
    const std::int64_t cache_size = num_blocks * kBlockSize * kKvHeads * kDim;
    for (int layer = 0; layer < layers; ++layer) {
      key_caches_.push_back(random_elements(cache_size, random));
      value_caches_.push_back(random_elements(cache_size, random));
    }
    for (const AttentionBatch::Sequence& sequence : batch_.sequences()) {
      cached_bytes_ += (sequence.past_tokens + sequence.new_tokens) * kTokenBytes;
    }
    copy_.resize(static_cast<std::size_t>(cached_bytes_ / 4));
  }

  // Seconds per layer.
  double attend(PagedAttention& attention) {
    const double start = cpu_seconds();
    for (std::size_t layer = 0; layer < key_caches_.size(); ++layer) {
      attention.run(batch_, args(layer));
    }
    return (cpu_seconds() - start) / static_cast<double>(key_caches_.size());
  }

  double copy() {
    const double start = cpu_seconds();
    for (std::size_t layer = 0; layer < key_caches_.size(); ++layer) {
      std::memcpy(copy_.data(), key_caches_[layer].data(), copy_.size() * 2);
      std::memcpy(copy_.data(), value_caches_[layer].data(), copy_.size() * 2);
      volatile std::uint16_t sink = copy_[copy_.size() / 2];
      static_cast<void>(sink);
    }
    return (cpu_seconds() - start) / static_cast<double>(key_caches_.size());
  }

  std::int64_t cached_bytes() const { return cached_bytes_; }

 private:
  AttentionArgs args(std::size_t layer) {
    AttentionArgs args;
    args.query = {query_.data(), kDim, kHeads * kDim};
    args.key = {key_.data(), kDim, kKvHeads * kDim};
    args.value = {value_.data(), kDim, kKvHeads * kDim};
    args.output = output_.data();
    args.key_cache = key_caches_[layer].data();
    args.value_cache = value_caches_[layer].data();
    args.num_blocks = num_blocks_;
    args.num_heads = kHeads;
    args.num_kv_heads = kKvHeads;
    args.key_dim = kDim;
    args.value_dim = kDim;
    args.scaling = 0.125F;
    args.dtype = pagedlora::Dtype::bfloat16;
    return args;
  }

  AttentionBatch batch_;
  std::int64_t num_blocks_;
  std::int64_t cached_bytes_ = 0;
  Elements query_, key_, value_, output_, copy_;
  std::vector<Elements> key_caches_, value_caches_;
};

Workload make_workload(const std::vector<AttentionBatch::Sequence>& shapes, int layers,
                       std::mt19937& random) {
  std::vector<AttentionBatch::Sequence> sequences = shapes;
  std::vector<std::int32_t> free_blocks;
  for (const AttentionBatch::Sequence& sequence : sequences) {
    const std::int64_t tokens = sequence.past_tokens + sequence.new_tokens;
    for (std::int64_t i = 0; i < tokens; i += kBlockSize) {
      free_blocks.push_back(static_cast<std::int32_t>(free_blocks.size()));
    }
  }
  const auto num_blocks = static_cast<std::int64_t>(free_blocks.size());
  std::shuffle(free_blocks.begin(), free_blocks.end(), random);
  for (AttentionBatch::Sequence& sequence : sequences) {
    const std::int64_t tokens = sequence.past_tokens + sequence.new_tokens;
    for (std::int64_t i = 0; i < tokens; i += kBlockSize) {
      sequence.blocks.push_back(free_blocks.back());
      free_blocks.pop_back();
    }
  }
  return Workload(AttentionBatch(std::move(sequences), kBlockSize), num_blocks, layers, random);
}

// The times of one instruction set.
struct Series {
  pagedlora::Isa isa;
  PagedAttention attention{isa};
  std::vector<double> decode_s{};
  std::vector<double> prefill_s{};
};

std::vector<Series> make_series() {
  std::vector<Series> all;
  for (const pagedlora::Isa isa : pagedlora::kIsas) {
    if (isa <= pagedlora::best_isa()) {
      all.push_back({isa});
    }
  }
  return all;
}

void print(const Series& series, std::int64_t decode_bytes, const char* separator) {
  const double flops = 0.5 * kPromptTokens * (kPromptTokens + 1.0) * kHeads * 4.0 * kDim;
  const double decode_s = median(series.decode_s);
  const double prefill_s = median(series.prefill_s);
  std::printf(
      "%s{\"isa\": \"%s\", \"decode_us_per_layer\": %.1f, \"decode_kv_gb_per_s\": %.1f, "
      "\"prefill_ms_per_layer\": %.2f, \"prefill_gflop_per_s\": %.1f}",
      separator, std::string(pagedlora::isa_name(series.isa)).c_str(), decode_s * 1e6,
      static_cast<double>(decode_bytes) / decode_s * 1e-9, prefill_s * 1e3,
      flops / prefill_s * 1e-9);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  std::mt19937 random(7);
  std::vector<AttentionBatch::Sequence> decode_shapes;
  for (int i = 0; i < kDecodeSequences; ++i) {  // 5 to 200 tokens with the new one
    decode_shapes.push_back({{}, 4 + i * 13, 1});
  }
  Workload decode = make_workload(decode_shapes, kLayers, random);
  Workload prefill = make_workload({{{}, 0, kPromptTokens}}, 1, random);
  std::vector<Series> all = make_series();

  std::vector<double> decode_copy_s, prefill_copy_s;
  for (int round = -1; round < rounds; ++round) {
    for (Series& series : all) {
      const double decode_s = decode.attend(series.attention);
      const double prefill_s = prefill.attend(series.attention);
      if (round >= 0) {  // the first is for warming up
        series.decode_s.push_back(decode_s);
        series.prefill_s.push_back(prefill_s);
      }
    }
    decode_copy_s.push_back(decode.copy());
    prefill_copy_s.push_back(prefill.copy());
  }
  std::printf(
      "{\"benchmark\": \"paged_attention\", \"rounds\": %d, \"decode_copy_us_per_layer\": %.1f, "
      "\"prefill_copy_ms_per_layer\": %.3f, \"cases\": [",
      rounds, median(decode_copy_s) * 1e6, median(prefill_copy_s) * 1e3);
  for (const Series& series : all) {
    print(series, decode.cached_bytes(), &series == &all.front() ? "" : ", ");
  }
  std::printf("]}\n");
  return 0;
}
