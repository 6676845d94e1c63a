// A device that counts what it is asked for and fails on command.
//
// Programmed by one thread while nothing runs; used like any Device.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>

#include "pagedlora/device.h"

namespace pagedlora::testing_support {

class CopyFailure : public std::runtime_error {
 public:
  CopyFailure() : std::runtime_error("the fake device was told to fail this copy") {}
};

class FakeDevice final : public Device {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  ~FakeDevice() override {
    if (live_bytes != 0) {
      std::abort();  // an arena leaked
    }
  }

  // The copies until the next one that throws: 0 fails the next one, once.
  std::atomic<int> fail_copy_after{kNever};
  std::atomic<bool> refuse_allocations{false};

  std::atomic<int> copies_from_host{0};
  std::atomic<int> copies_to_host{0};
  std::atomic<int> runs{0};
  std::atomic<std::size_t> copied_bytes{0};
  std::atomic<std::size_t> live_bytes{0};
  std::atomic<std::size_t> prefaulted_bytes{0};

  std::string_view name() const override { return "fake"; }
  MemoryInfo memory_info() const override { return {std::size_t{1} << 30, std::size_t{1} << 30}; }

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
  static constexpr std::size_t kAlignment = 4096;

  static std::size_t rounded(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  void copy(std::span<const CopyRun> copy_runs) {
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
};

}  // namespace pagedlora::testing_support
