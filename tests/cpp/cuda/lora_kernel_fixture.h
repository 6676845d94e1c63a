// Runs the LoRA kernels' bodies on the host over the tables that the device would be given.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "body/lora_expand.h"
#include "body/lora_look_up.h"
#include "body/lora_shrink.h"
#include "cuda/run_on_host.h"
#include "lora_reference.h"
#include "pagedlora/cuda/lora_tables.h"
#include "with_dtype.h"

namespace pagedlora::testing_support {

inline std::shared_ptr<const Layout> unowned(const Layout& layout) {
  return {std::shared_ptr<const Layout>{}, &layout};
}

inline cuda::LoraTableCapacity roomy(std::uint32_t max_tokens) {
  return {max_tokens, 16, 12, 1U << 20, 1U << 16};
}

// How a launch is done; none of it may change a result.
struct LaunchOptions {
  std::uint32_t tokens_per_pass = 1;  // 1 or 4
  std::uint32_t num_tiles = 0;        // of the grid; 0: as many as there are
  std::mt19937* order = nullptr;      // of blocks and threads
  std::uint32_t blocks_y = 0;         // of the grid of the shrink kernel; 0: max_blocks
};

// Memory that holds NaN until a thread has waited for the stream; what was written before is lost.
class LateMemory {
 public:
  explicit LateMemory(std::vector<std::span<float>> memory) : memory_(std::move(memory)) {
    for (const std::span<float> piece : memory_) {
      content_.emplace_back(piece.begin(), piece.end());
    }
    cuda::host_wait = &on_wait_;
  }
  ~LateMemory() {
    before_run();
    on_wait_();
    cuda::host_wait = nullptr;
  }
  LateMemory(const LateMemory&) = delete;
  LateMemory& operator=(const LateMemory&) = delete;

  void before_run() {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (is_there_) {
        std::ranges::copy(memory_[i], content_[i].begin());
      }
      std::ranges::fill(memory_[i], std::numeric_limits<float>::quiet_NaN());
    }
    is_there_ = false;
  }

  int num_waits() const { return num_waits_; }

 private:
  std::vector<std::span<float>> memory_;
  std::vector<std::vector<float>> content_;
  bool is_there_ = true;
  int num_waits_ = 0;
  std::function<void()> on_wait_ = [this] {
    ++num_waits_;
    for (std::size_t i = 0; i < memory_.size() && !is_there_; ++i) {
      std::ranges::copy(content_[i], memory_[i].begin());
    }
    is_there_ = true;
  };
};

class LoraLaunches {
 public:
  LoraLaunches(const cuda::LoraTables& tables, ModuleIndex module, const LaunchOptions& options)
      : tables_(tables.view(tables.bytes().data())),
        module_(module.value),
        options_(options),
        num_tiles_(options.num_tiles == 0 ? tables.num_tiles() : options.num_tiles),
        rank_space_(std::size_t{tables_.max_tokens} * tables_.max_blocks * kMaxBlockRanks,
                    std::numeric_limits<float>::quiet_NaN()) {}

  void shrink(Matrix& x) { shrink(x.data(), x.stride(), x.dtype()); }
  void shrink(const std::byte* x, std::int64_t row_stride, Dtype dtype) {
    cuda::with_dtype(dtype, [&]<class X>(X) {
      cuda::with_dtype(tables_.weights, [&]<class W>(W) {
        const auto run = [&]<class Body>(const Body&) {
          const std::uint32_t blocks_y =
              options_.blocks_y == 0 ? tables_.max_blocks : options_.blocks_y;
          run_on_host(Body{tables_, module_, reinterpret_cast<const X*>(x), row_stride,
                           rank_space_.data(), blocks_y},
                      num_tiles_, blocks_y, options_.order, before_run_);
        };
        options_.tokens_per_pass == 1 ? run(cuda::LoraShrink<X, W, 1>{})
                                      : run(cuda::LoraShrink<X, W, 4>{});
      });
    });
  }

  void look_up(const std::vector<std::int64_t>& token_ids, float factor) {
    cuda::with_dtype(tables_.weights, [&]<class W>(W) {
      run_on_host(
          cuda::LoraLookUp<W>{tables_, module_, token_ids.data(), factor, rank_space_.data()},
          num_tiles_, tables_.max_blocks, options_.order, before_run_);
    });
  }

  void expand(Matrix& y, Matrix* base_bias = nullptr) {
    cuda::with_dtype(y.dtype(), [&]<class Y>(Y) {
      cuda::with_dtype(tables_.weights, [&]<class W>(W) {
        const auto run = [&]<class Body>(const Body&) {
          run_on_host(
              Body{tables_, module_, rank_space_.data(), reinterpret_cast<Y*>(y.data()), y.stride(),
                   base_bias == nullptr ? nullptr : reinterpret_cast<const Y*>(base_bias->data())},
              num_tiles_, (y.features() + Body::kThreads - 1) / Body::kThreads, options_.order,
              before_run_);
        };
        options_.tokens_per_pass == 1 ? run(cuda::LoraExpand<Y, W, 1>{})
                                      : run(cuda::LoraExpand<Y, W, 4>{});
      });
    });
  }

  std::vector<float>& rank_space() { return rank_space_; }

  // Of all launches that follow: see run_on_host.h.
  void call_before_run(std::function<void()> before_run) { before_run_ = std::move(before_run); }

 private:
  cuda::LoraTablesView tables_;
  std::uint32_t module_;
  LaunchOptions options_;
  std::uint32_t num_tiles_;
  std::vector<float> rank_space_;
  std::function<void()> before_run_;
};

inline void apply_on_host(const cuda::LoraTables& tables, ModuleIndex module, Matrix& x, Matrix& y,
                          Matrix* base_bias = nullptr, const LaunchOptions& options = {}) {
  LoraLaunches launches(tables, module, options);
  launches.shrink(x);
  launches.expand(y, base_bias);
}

// What lora_kernels.h promises of a row, but for bias and DoRA scale.
inline double kernel_rounding_bound(const Layout& layout, std::uint32_t row) {
  double longest_lane = 0;
  for (const Block& block : layout.blocks_of_row(row)) {
    double lane = 0;
    for (const Part& part : layout.a_parts(block)) {
      lane += 8 * std::ceil(part.length / 1024.0);
    }
    longest_lane = std::max(longest_lane, lane);
  }
  const auto blocks = static_cast<double>(layout.blocks_of_row(row).size());
  return (longest_lane + 8 + 4 + blocks + 1) * unit_roundoff(Dtype::float32) * 1.001;
}

inline int num_wrong_on_device(const Adapter& adapter, ModuleIndex module, const Matrix& x,
                               const Matrix& before, const Matrix& after,
                               const Matrix* base_bias = nullptr) {
  return num_wrong_by_bound(kernel_rounding_bound, adapter, module, x, before, after, base_bias);
}

}  // namespace pagedlora::testing_support
