// Who writes the pages of a load, and who says whether they may.
//
// Each reader of the load has a gate of its own, which it holds while it writes a chunk: readers do
// not wait for each other. Whoever changes what they go by holds all gates, so that when it returns
// nothing is written any more by the old rules. What is guarded may be read through one gate, and
// changed through all.
//
// Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

namespace pagedlora::internal {

class WriteGates {
 public:
  static constexpr std::size_t kNumGates = 4;

  using One = std::unique_lock<std::mutex>;
  using All = std::array<One, kNumGates>;

  One enter(std::size_t gate) { return One(gates_[gate]); }

  All close() noexcept {
    All all;
    for (std::size_t i = 0; i < kNumGates; ++i) {
      all[i] = One(gates_[i]);
    }
    return all;
  }

 private:
  std::array<std::mutex, kNumGates> gates_;
};

}  // namespace pagedlora::internal
