// A device for tests: ordinary memory, copies that are late, out of order, never done or failing,
// and batches whose reads go on after their lease is closed.
//
// Counts what it is asked for. Thread-safe.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pagedlora/device.h"
#include "pagedlora/fake/gate.h"

namespace pagedlora::fake {

class CopyFailure : public std::runtime_error {
 public:
  CopyFailure() : std::runtime_error("the fake device was told to fail this copy") {}
};

class Device final : public pagedlora::Device {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  // `is_host_memory`: whether one pass over a source may fill it beside the host tier.
  explicit Device(bool is_host_memory = false) : is_host_memory_(is_host_memory) {}
  ~Device() override {
    if (live_bytes != 0) {
      std::abort();  // an arena leaked
    }
  }

  // Every copy passes it before it moves a byte.
  Gate copies;
  // The copies until the next one that throws: 0 fails the next one, once.
  std::atomic<int> fail_copy_after{kNever};
  std::atomic<bool> refuse_allocations{false};

  std::atomic<int> copies_from_host{0};
  std::atomic<int> copies_to_host{0};
  std::atomic<int> runs{0};
  std::atomic<std::size_t> copied_bytes{0};
  std::atomic<std::size_t> live_bytes{0};
  std::atomic<std::size_t> prefaulted_bytes{0};

  // From now on closed leases leave reads behind, until finish_reads().
  void hold_reads() {
    const std::scoped_lock lock(mutex_);
    holds_reads_ = true;
  }
  void finish_reads() {
    const std::scoped_lock lock(mutex_);
    holds_reads_ = false;
    for (const std::shared_ptr<Reads>& reads : std::exchange(reads_, {})) {
      reads->over = true;
    }
  }

  std::string_view name() const override { return "fake"; }
  MemoryInfo memory_info() const override { return {std::size_t{1} << 30, std::size_t{1} << 30}; }
  bool is_host_memory() const override { return is_host_memory_; }

  std::shared_ptr<const PageUse> launched_work(void* /*stream*/) override {
    const std::scoped_lock lock(mutex_);
    if (!holds_reads_) {
      return nullptr;
    }
    reads_.push_back(std::make_shared<Reads>());
    return reads_.back();
  }

  std::byte* try_allocate(std::size_t bytes) override {
    if (refuse_allocations) {
      return nullptr;
    }
    void* arena = std::aligned_alloc(kAlignment, rounded(bytes));
    std::memset(arena, 0xEE, rounded(bytes));
    live_bytes += bytes;
    return static_cast<std::byte*>(arena);
  }
  void deallocate(std::byte* arena, std::size_t bytes) noexcept override {
    live_bytes -= bytes;
    std::free(arena);
  }
  void prefault(std::byte* /*begin*/, std::size_t bytes) noexcept override {
    prefaulted_bytes += bytes;
  }

  void copy_from_host(std::span<const CopyRun> copy_runs) override {
    ++copies_from_host;
    copy(copy_runs);
  }
  void copy_to_host(std::span<const CopyRun> copy_runs) override {
    ++copies_to_host;
    copy(copy_runs);
  }

 private:
  struct Reads final : PageUse {
    bool is_over() const override { return over; }
    std::atomic<bool> over{false};
  };

  static constexpr std::size_t kAlignment = 4096;

  static std::size_t rounded(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  void copy(std::span<const CopyRun> copy_runs) {
    copies.pass();
    if (fail_copy_after != kNever && fail_copy_after-- == 0) {
      fail_copy_after = kNever;
      throw CopyFailure();
    }
    for (const CopyRun& run : copy_runs) {
      std::memcpy(run.target, run.source, run.bytes);
      copied_bytes += run.bytes;
      ++runs;
    }
  }

  bool is_host_memory_;
  std::mutex mutex_;
  bool holds_reads_ = false;
  std::vector<std::shared_ptr<Reads>> reads_;
};

}  // namespace pagedlora::fake
