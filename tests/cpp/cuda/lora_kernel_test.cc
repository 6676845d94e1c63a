// The bodies of the LoRA kernels against the exact result (design 3.7: float32 accumulation in fixed
// order, independent of neighbours; promise 5: CPU and GPU differ only by rounding).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cuda/lora_kernel_fixture.h"
#include "cuda/random_lora_batch.h"
#include "random_seeds.h"

namespace pagedlora::cuda {
namespace {

using testing_support::Adapter;
using testing_support::apply_on_host;
using testing_support::Batch;
using testing_support::config_of;
using testing_support::kDtypes;
using testing_support::kernel_rounding_bound;
using testing_support::kModule;
using testing_support::LateMemory;
using testing_support::LaunchOptions;
using testing_support::LoraLaunches;
using testing_support::Matrix;
using testing_support::pick;
using testing_support::random_part_bytes;
using testing_support::random_size;
using testing_support::Rng;
using testing_support::roomy;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::unowned;

using Segments = std::vector<LoraTables::Segment>;

std::span<float> floats_of(Matrix& matrix) {
  return {reinterpret_cast<float*>(matrix.data()),
          std::size_t{matrix.rows()} * static_cast<std::size_t>(matrix.stride())};
}

std::vector<std::uint32_t> few_seeds(int plain) {
  return seeds(static_cast<std::uint32_t>(testing_support::num_steps(plain)));
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
        const LaunchOptions options{tokens_per_pass, 64, &rng, pick(rng, 1, 60)};
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

// A kernel that starts early may look for its weights, and no more, before those before it have ended
// (kernel_index.h): x, y and rank space are theirs until then.
TEST(LoraKernelTest, WhatEarlierKernelsWriteIsTouchedOnlyAfterTheWait) {
  int num_waits = 0;
  bool is_touched = false;
  for (const std::uint32_t seed : few_seeds(20)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const std::uint32_t in = pick(rng, 1, 300);
    const std::uint32_t out = pick(rng, 1, 200);
    Batch batch(in, out, kDtypes[seed % 3], 0, rng);
    Matrix x = Matrix::random(batch.num_tokens(), in, Dtype::float32, rng);
    const Matrix before = Matrix::random(batch.num_tokens(), out, Dtype::float32, rng);
    batch.tables.set_batch(batch.segments, 3);
    Matrix expected = before;
    apply_on_host(batch.tables, kModule, x, expected);
    is_touched = is_touched || expected.bytes() != before.bytes();
    for (const std::uint32_t tokens_per_pass : {1U, 4U}) {
      Matrix after = before;
      LoraLaunches launches(batch.tables, kModule, {tokens_per_pass, 0, &rng});
      {
        LateMemory late({floats_of(x), launches.rank_space()});
        launches.call_before_run([&] { late.before_run(); });
        launches.shrink(x);
        num_waits += late.num_waits();
      }
      {
        LateMemory late({floats_of(after), launches.rank_space()});
        launches.call_before_run([&] { late.before_run(); });
        launches.expand(after);
      }
      ASSERT_EQ(after.bytes(), expected.bytes()) << tokens_per_pass;
    }
  }
  EXPECT_EQ(num_waits > 0, is_touched);
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
