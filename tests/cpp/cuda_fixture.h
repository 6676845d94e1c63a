// Streams and waiting, for the tests of CudaDevice over the runtime of cuda_fake/.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_fake/fake_cuda.h"
#include "pagedlora/cuda/cuda_device.h"
#include "pagedlora/fake/gate.h"

namespace pagedlora::testing_support {

inline constexpr std::size_t kPage = 4096;

// Waits, by the system's clock, until it is true; false if it does not become so.
inline bool becomes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

// What the caller of a batch launches its kernels on.
class ComputeStream {
 public:
  ComputeStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~ComputeStream() {
    if (cudaStreamDestroy(stream_) != cudaSuccess) {
      cudaGetLastError();
    }
  }
  ComputeStream(const ComputeStream&) = delete;
  ComputeStream& operator=(const ComputeStream&) = delete;

  void* get() const { return stream_; }
  cudaStream_t handle() const { return stream_; }
  void launch(std::function<void()> kernel) const { fake_cuda::launch(stream_, std::move(kernel)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A kernel that waits to be let go and then reads memory of the GPU.
class HeldRead {
 public:
  HeldRead(const ComputeStream& stream, const std::byte* address, std::size_t bytes) {
    gate.close();
    stream.launch([state = state_, this, address, bytes] {
      gate.pass();
      const std::byte* content = fake_cuda::backing(address);
      state->content.assign(content, content + bytes);
      state->is_over = true;
    });
  }
  ~HeldRead() {
    gate.open();
    EXPECT_TRUE(becomes_true([&] { return state_->is_over.load(); }));
  }
  HeldRead(const HeldRead&) = delete;
  HeldRead& operator=(const HeldRead&) = delete;

  bool is_over() const { return state_->is_over; }
  // Lets it go and waits for it.
  const std::vector<std::byte>& content() {
    gate.open();
    EXPECT_TRUE(becomes_true([&] { return is_over(); }));
    return state_->content;
  }

  fake::Gate gate;

 private:
  struct State {
    std::vector<std::byte> content;
    std::atomic<bool> is_over{false};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pagedlora::testing_support
