// The bodies of the LoRA kernels against the exact result (design 3.7: float32 accumulation in fixed
// order, independent of neighbours; promise 5: CPU and GPU differ only by rounding).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "cuda/lora_kernel_fixture.h"
#include "random_seeds.h"

namespace pagedlora::cuda {
namespace {

using testing_support::Adapter;
using testing_support::apply_on_host;
using testing_support::config_of;
using testing_support::kernel_rounding_bound;
using testing_support::LaunchOptions;
using testing_support::LoraLaunches;
using testing_support::Matrix;
using testing_support::num_wrong_on_device;
using testing_support::Rng;
using testing_support::roomy;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::uniform;
using testing_support::unowned;

using Segments = std::vector<LoraTables::Segment>;

constexpr std::array kDtypes{Dtype::float32, Dtype::float16, Dtype::bfloat16};
constexpr ModuleIndex kModule{0};

std::vector<std::uint32_t> few_seeds(int plain) {
  return seeds(static_cast<std::uint32_t>(testing_support::num_steps(plain)));
}

std::uint32_t pick(Rng& rng, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
}

// One or two rows for module 0, a slice each, with what rows can have; or none.
std::vector<RowShape> random_rows(std::uint32_t in, std::uint32_t out, Rng& rng) {
  const auto rank = [&] { return pick(rng, 0, 2) == 0 ? 8 * pick(rng, 1, 3) : pick(rng, 1, 20); };
  const bool has_vectors = pick(rng, 0, 1) == 0;
  const auto vector = [&] { return has_vectors && pick(rng, 0, 1) == 0; };
  switch (pick(rng, 0, 7)) {
    case 0:  // other outputs
      if (out > 1) {
        const std::uint32_t cut = pick(rng, 1, out - 1);
        return {{kModule, rank(), {0, in}, {0, cut}, vector(), vector()},
                {kModule, rank(), {in / 2, in - in / 2}, {cut, out - cut}, vector(), vector()}};
      }
      [[fallthrough]];
    case 1:  // other inputs, the same outputs
      if (in > 1) {
        const std::uint32_t cut = pick(rng, 1, in - 1);
        return {{kModule, rank(), {0, cut}, {}, vector(), false},
                {kModule, rank(), {cut, in - cut}, {out / 2, out - out / 2}, vector(), false}};
      }
      [[fallthrough]];
    default:
      return {{kModule, rank(), {}, {}, vector(), vector()}};
  }
}

// Adapters for one module, in tables, and a batch of tokens.
class Batch {
 public:
  Batch(std::uint32_t in, std::uint32_t out, Dtype weights, std::size_t max_part_bytes, Rng& rng)
      : config_(config_of({{in, out}, {8, 8}})), tables(roomy(64), weights) {
    const std::uint32_t count = pick(rng, 1, 4);
    for (std::uint32_t i = 0; i < count; ++i) {
      std::vector<RowShape> rows = random_rows(in, out, rng);
      if (pick(rng, 0, 5) == 0) {
        rows = {{ModuleIndex{1}, 3}};  // does not touch module 0
      }
      adapters.push_back(
          std::make_unique<Adapter>(config_, std::move(rows), weights, max_part_bytes, rng));
      slots.push_back(
          tables.try_add_task(adapters[i]->pages(), unowned(adapters[i]->layout())).value());
    }
    const std::uint32_t num_segments = pick(rng, 1, 8);
    for (std::uint32_t i = 0; i < num_segments; ++i) {
      const std::uint32_t adapter = pick(rng, 0, count);  // count: the base model
      const std::uint32_t tokens = pick(rng, 0, pick(rng, 0, 2) == 0 ? 7 : 1);
      segments.push_back({adapter == count ? std::nullopt : std::optional(slots[adapter]), tokens});
      adapter_of_token.insert(adapter_of_token.end(), tokens, adapter);
    }
  }

  std::uint32_t num_tokens() const { return static_cast<std::uint32_t>(adapter_of_token.size()); }

  // Rows of x and y of one adapter's tokens.
  std::vector<std::uint32_t> tokens_of(std::uint32_t adapter) const {
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t token = 0; token < num_tokens(); ++token) {
      if (adapter_of_token[token] == adapter) {
        tokens.push_back(token);
      }
    }
    return tokens;
  }

  void expect_exact(Matrix& x, const Matrix& before, const Matrix& after, Matrix* bias) const {
    for (std::uint32_t i = 0; i < adapters.size(); ++i) {
      const std::vector<std::uint32_t> tokens = tokens_of(i);
      EXPECT_EQ(num_wrong_on_device(*adapters[i], kModule, x.pick(tokens, x.dtype(), 0),
                                    before.pick(tokens, x.dtype(), 0),
                                    after.pick(tokens, x.dtype(), 0), bias),
                0)
          << "adapter " << i;
    }
    for (const std::uint32_t token : tokens_of(static_cast<std::uint32_t>(adapters.size()))) {
      EXPECT_EQ(after.row_bytes(token), before.row_bytes(token)) << "base token " << token;
    }
  }

 private:
  LoraModelConfig config_;

 public:
  LoraTables tables;
  std::vector<std::unique_ptr<Adapter>> adapters;
  std::vector<std::uint32_t> slots;
  Segments segments;
  std::vector<std::uint32_t> adapter_of_token;
};

// Of parts, so that some are tiled; 0: no limit.
std::size_t random_part_bytes(std::uint32_t most_features, Dtype weights, Rng& rng) {
  const std::size_t whole = std::size_t{most_features} * kMaxBlockRanks * element_bytes(weights);
  return pick(rng, 0, 1) == 0 ? 0 : std::min<std::size_t>(whole, 32 * pick(rng, 1, 60));
}

std::uint32_t random_size(Rng& rng) {
  switch (pick(rng, 0, 4)) {
    case 0:
      return pick(rng, 1, 9);
    case 1:
      return pick(rng, 1'020, 1'100);  // a chunk of every lane, and a little
    case 2:
      return 8 * pick(rng, 1, 40);
    default:
      return pick(rng, 2, 300);
  }
}

TEST(LoraKernelTest, MixedBatchesAreExactUpToTheStatedRounding) {
  for (const std::uint32_t seed : few_seeds(150)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype activations = kDtypes[seed % 3];
    const Dtype weights = kDtypes[seed / 3 % 3];
    const std::uint32_t in = random_size(rng);
    const std::uint32_t out = random_size(rng);
    Batch batch(in, out, weights, random_part_bytes(std::max(in, out), weights, rng), rng);
    Matrix x = Matrix::random(batch.num_tokens(), in, activations, rng, 1.0F, pick(rng, 0, 9));
    const Matrix before = Matrix::random(batch.num_tokens(), out, activations, rng);
    Matrix bias = Matrix::random(1, out, activations, rng);
    Matrix* base_bias = pick(rng, 0, 1) == 0 ? nullptr : &bias;
    Matrix after = before;
    batch.tables.set_batch(batch.segments, pick(rng, 1, 6));
    const LaunchOptions options{pick(rng, 0, 1) == 0 ? 1U : 4U, 0, &rng};
    apply_on_host(batch.tables, kModule, x, after, base_bias, options);
    batch.expect_exact(x, before, after, base_bias);
    if (HasFailure()) {
      return;
    }
  }
}

// Tiles, passes, the grid and the order of threads are a matter of speed.
TEST(LoraKernelTest, NeitherTilesNorPassesNorTheGridNorTheOrderOfThreadsChangeABit) {
  for (const std::uint32_t seed : few_seeds(30)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype activations = kDtypes[seed % 3];
    const std::uint32_t in = random_size(rng);
    const std::uint32_t out = random_size(rng);
    Batch batch(in, out, kDtypes[seed / 3 % 3], 0, rng);
    Matrix x = Matrix::random(batch.num_tokens(), in, activations, rng);
    const Matrix before = Matrix::random(batch.num_tokens(), out, activations, rng);
    Matrix expected = before;
    batch.tables.set_batch(batch.segments, 1);
    apply_on_host(batch.tables, kModule, x, expected);
    for (const std::uint32_t tokens_per_tile : {1U, 3U, 5U, 64U}) {
      for (const std::uint32_t tokens_per_pass : {1U, 4U}) {
        Matrix after = before;
        batch.tables.set_batch(batch.segments, tokens_per_tile);
        const LaunchOptions options{tokens_per_pass, 64, &rng};
        apply_on_host(batch.tables, kModule, x, after, nullptr, options);
        ASSERT_EQ(after.bytes(), expected.bytes()) << tokens_per_tile << ", " << tokens_per_pass;
      }
    }
  }
}

// Nor does who else is in the batch, or where x and y lie.
TEST(LoraKernelTest, ATokenAloneHasTheBitsThatItHasInABatch) {
  for (const std::uint32_t seed : few_seeds(30)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype activations = kDtypes[seed % 3];
    const std::uint32_t in = random_size(rng);
    const std::uint32_t out = random_size(rng);
    Batch batch(in, out, kDtypes[seed / 3 % 3], 0, rng);
    Matrix x = Matrix::random(batch.num_tokens(), in, activations, rng);
    const Matrix before = Matrix::random(batch.num_tokens(), out, activations, rng);
    Matrix together = before;
    batch.tables.set_batch(batch.segments, 4);
    apply_on_host(batch.tables, kModule, x, together, nullptr, {4, 0, &rng});
    for (std::uint32_t token = 0; token < batch.num_tokens(); ++token) {
      const std::uint32_t adapter = batch.adapter_of_token[token];
      if (adapter == batch.adapters.size()) {
        continue;
      }
      Matrix own_x = x.pick({token}, activations, pick(rng, 0, 7));
      Matrix own_y = before.pick({token}, activations, pick(rng, 0, 7));
      batch.tables.set_batch(Segments{{batch.slots[adapter], 1}}, 1);
      apply_on_host(batch.tables, kModule, own_x, own_y);
      ASSERT_EQ(own_y.row_bytes(0), together.row_bytes(token)) << "token " << token;
    }
  }
}

// 16 bytes at a time where x and A allow it; element by element otherwise.
TEST(LoraKernelTest, AlignmentIsAMatterOfSpeed) {
  for (const std::uint32_t seed : few_seeds(30)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const Dtype activations = kDtypes[seed % 3];
    const Dtype weights = kDtypes[seed / 3 % 3];
    const std::uint32_t in = 8 * pick(rng, 1, 300) + pick(rng, 0, 1) * pick(rng, 1, 7);
    const LoraModelConfig config = config_of({{in, 8}});
    Adapter adapter(config, {{kModule, pick(rng, 1, 20)}}, weights,
                    random_part_bytes(in, weights, rng), rng);
    LoraTables tables(roomy(16), weights);
    const std::uint32_t slot =
        tables.try_add_task(adapter.pages(), unowned(adapter.layout())).value();
    const std::uint32_t tokens = pick(rng, 1, 9);
    tables.set_batch(Segments{{slot, tokens}}, 16);
    Matrix shifted = Matrix::random(tokens, in, activations, rng);  // at odd places
    const std::size_t stride = (in + 7) / 8 * 8;
    std::vector<float> memory(tokens * stride);  // of the largest type; new aligns it to 16
    auto* aligned = reinterpret_cast<std::byte*>(memory.data());
    for (std::uint32_t token = 0; token < tokens; ++token) {
      std::ranges::copy(shifted.row_bytes(token),
                        aligned + token * stride * element_bytes(activations));
    }
    for (const std::uint32_t tokens_per_pass : {1U, 4U}) {
      LoraLaunches any(tables, kModule, {tokens_per_pass, 0, &rng});
      LoraLaunches fast(tables, kModule, {tokens_per_pass, 0, &rng});
      any.shrink(shifted);
      fast.shrink(aligned, static_cast<std::int64_t>(stride), activations);
      const std::size_t used = std::size_t{tokens} * 12 * kMaxBlockRanks * sizeof(float);
      ASSERT_EQ(std::memcmp(fast.rank_space().data(), any.rank_space().data(), used), 0);
    }
  }
}

// The order of the sums as lora_shrink.h and lora_expand.h state it, written down once more without
// tables, tiles, phases or shared memory: what the device's threads and barriers must come to.
float sum_of_lanes(const std::vector<float>& a, const std::vector<float>& x) {
  std::array<float, 128> lanes{};
  for (std::size_t i = 0; i < x.size(); ++i) {
    float& lane = lanes[i / 8 % 128];
    lane = std::fma(a[i], x[i], lane);
  }
  for (std::size_t width = 64; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) {
      lanes[lane] += lanes[lane + width];
    }
  }
  return lanes[0];
}

TEST(LoraKernelTest, TheSumsAreInTheStatedOrder) {
  Rng rng(5);
  constexpr std::uint32_t kIn = 3'001;
  constexpr std::uint32_t kOut = 150;
  constexpr std::uint32_t kRank = 21;
  const LoraModelConfig config = config_of({{kIn, kOut}});
  Adapter adapter(config, {{kModule, kRank}}, Dtype::float32, 0, rng);
  LoraTables tables(roomy(8), Dtype::float32);
  const std::uint32_t slot =
      tables.try_add_task(adapter.pages(), unowned(adapter.layout())).value();
  tables.set_batch(Segments{{slot, 1}}, 1);
  Matrix x = Matrix::random(1, kIn, Dtype::float32, rng);
  const Matrix before = Matrix::random(1, kOut, Dtype::float32, rng);
  Matrix after = before;
  apply_on_host(tables, kModule, x, after);

  const Adapter::Row& row = adapter.rows[0];
  std::vector<float> features;
  for (std::uint32_t i = 0; i < kIn; ++i) {
    features.push_back(x.get(0, i));
  }
  std::array<float, 24> t{};
  for (std::uint32_t rank = 0; rank < kRank; ++rank) {
    const std::vector<float> a(row.a.begin() + rank * kIn, row.a.begin() + (rank + 1) * kIn);
    t[rank] = sum_of_lanes(a, features) * adapter.scales[0];
  }
  for (std::uint32_t o = 0; o < kOut; ++o) {
    float sum = 0;
    for (std::uint32_t block = 0; block < 3; ++block) {
      const auto term = [&](std::uint32_t r) {
        const std::uint32_t rank = 8 * block + r;
        return rank < kRank ? row.b[o * kRank + rank] : 0.0F;
      };
      const auto pair = [&](std::uint32_t r) {
        return std::fma(term(r + 1), t[8 * block + r + 1], term(r) * t[8 * block + r]);
      };
      sum += (pair(0) + pair(2)) + (pair(4) + pair(6));
    }
    ASSERT_EQ(after.get(0, o), before.get(0, o) + sum) << o;
  }
}

// Infinity times a zero that nobody asked for would be NaN; so would what lies behind a part.
TEST(LoraKernelTest, InfinitiesStayInTheirToken) {
  Rng rng(6);
  const LoraModelConfig config = config_of({{37, 29}});
  Adapter adapter(config, {{kModule, 5}}, Dtype::bfloat16, 0, rng);
  LoraTables tables(roomy(8), Dtype::bfloat16);
  const std::uint32_t slot =
      tables.try_add_task(adapter.pages(), unowned(adapter.layout())).value();
  tables.set_batch(Segments{{slot, 3}}, 3);
  Matrix x = Matrix::random(3, 37, Dtype::float32, rng);
  x.set(1, 36, std::numeric_limits<float>::infinity());
  Matrix y = Matrix::random(3, 29, Dtype::float32, rng);
  apply_on_host(tables, kModule, x, y, nullptr, {4, 0, &rng});
  for (std::uint32_t o = 0; o < 29; ++o) {
    EXPECT_TRUE(std::isfinite(y.get(0, o)));
    EXPECT_FALSE(std::isfinite(y.get(1, o)));
    EXPECT_TRUE(std::isfinite(y.get(2, o)));
  }
}

TEST(LoraKernelTest, SubnormalWeightsAndSumsAreKept) {
  Rng rng(7);
  const LoraModelConfig config = config_of({{1, 1}});
  Adapter adapter(config, {{kModule, 1}}, Dtype::float32, 0, rng);
  adapter.scales[0] = 0.5F;
  const TaskPages pages = adapter.pages();
  const Block& block = adapter.layout().blocks()[0];
  testing_support::store(pages.address(adapter.layout().a_parts(block)[0].at), Dtype::float32,
                         0x1p-140F);
  testing_support::store(pages.address(adapter.layout().b_parts(block)[0].at), Dtype::float32,
                         1.0F);
  LoraTables tables(roomy(8), Dtype::float32);
  const std::uint32_t slot = tables.try_add_task(pages, unowned(adapter.layout())).value();
  tables.set_batch(Segments{{slot, 1}}, 1);
  Matrix x(1, 1, Dtype::float32);
  Matrix y(1, 1, Dtype::float32);
  x.set(0, 0, 1.0F);
  y.set(0, 0, 0.0F);
  apply_on_host(tables, kModule, x, y);
  EXPECT_EQ(y.get(0, 0), 0x1p-141F);
}

TEST(LoraKernelTest, LooksUpTheColumnsOfTokensOfAnEmbedding) {
  for (const std::uint32_t seed : few_seeds(40)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const std::uint32_t out = random_size(rng);
    const Dtype weights = kDtypes[seed % 3];
    const std::uint32_t rank = pick(rng, 1, 20);
    const FeatureRange tokens{50, 100};
    const LoraModelConfig config({{"embed", -1, -1, 200, out, ModuleKind::embedding}}, weights, 64);
    Adapter adapter(config, {{kModule, rank, tokens}}, weights,
                    random_part_bytes(200, weights, rng), rng);
    LoraTables tables(roomy(64), weights);
    const std::uint32_t slot =
        tables.try_add_task(adapter.pages(), unowned(adapter.layout())).value();
    std::vector<std::int64_t> ids{49, 50, 149, 150, -1, 1LL << 40};
    for (std::uint32_t i = 0; i < 20; ++i) {
      ids.push_back(pick(rng, 0, 199));
    }
    const auto count = static_cast<std::uint32_t>(ids.size());
    tables.set_batch(Segments{{slot, count}}, pick(rng, 1, 30));
    const Matrix before = Matrix::random(count, out, Dtype::float32, rng);
    Matrix after = before;
    Matrix by_cpu = before;
    LoraLaunches launches(tables, kModule, {pick(rng, 0, 1) == 0 ? 1U : 4U, 0, &rng});
    launches.look_up(ids, 1.5F);
    launches.expand(after);
    LoraOperator lora(weights, Isa::portable);
    lora.apply_embedding(testing_support::batch_of({{adapter.pages(), count}}), kModule,
                         {ids.data(), by_cpu.data(), by_cpu.stride(), count, Dtype::float32, 1.5F});
    const double bound = 2 * kernel_rounding_bound(adapter.layout(), 0);
    for (std::uint32_t token = 0; token < count; ++token) {
      for (std::uint32_t o = 0; o < out; ++o) {
        // |A|, |B| <= 1 and |scale| <= 2.5: every term is at most 3.75.
        ASSERT_NEAR(after.get(token, o), by_cpu.get(token, o), bound * (1 + rank * 3.75));
      }
      if (ids[token] < 50 || ids[token] >= 150) {
        EXPECT_EQ(after.row_bytes(token), before.row_bytes(token));
      } else {
        EXPECT_NE(after.row_bytes(token), before.row_bytes(token));
      }
    }
  }
}

}  // namespace
}  // namespace pagedlora::cuda
