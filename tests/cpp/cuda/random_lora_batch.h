// Random adapters for one module, in the tables of the LoRA kernels, and a random batch of tokens.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "all_dtypes.h"
#include "cuda/lora_kernel_fixture.h"

namespace pagedlora::testing_support {

// Of parts, so that some are tiled; 0: no limit.
inline std::size_t random_part_bytes(std::uint32_t most_features, Dtype weights, Rng& rng) {
  const std::size_t whole = std::size_t{most_features} * kMaxBlockRanks * element_bytes(weights);
  return pick(rng, 0, 1) == 0 ? 0 : std::min<std::size_t>(whole, 32 * pick(rng, 1, 60));
}

inline std::uint32_t random_size(Rng& rng) {
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

// One or two rows for module 0, a slice each, with what rows can have; or none.
inline std::vector<RowShape> random_rows(std::uint32_t in, std::uint32_t out, Rng& rng) {
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
  cuda::LoraTables tables;
  std::vector<std::unique_ptr<Adapter>> adapters;
  std::vector<std::uint32_t> slots;
  std::vector<cuda::LoraTables::Segment> segments;
  std::vector<std::uint32_t> adapter_of_token;
};

}  // namespace pagedlora::testing_support
