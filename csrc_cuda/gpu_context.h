// One GPU, as its device and all that the device hands out share it: its number, whether it still
// works, and the one place where what the runtime returns is judged.
//
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

namespace pagedlora::cuda {

// Whether an error of this kind stays: every later call of the process fails with it.
bool leaves_gpu_unusable(cudaError_t error);

class GpuContext {
 public:
  explicit GpuContext(int ordinal) : ordinal_(ordinal) {}
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

  int ordinal() const { return ordinal_; }
  bool is_dead() const { return death_.load(std::memory_order_acquire) != nullptr; }
  void check_alive() const;  // throws GpuUnavailableError

  // Throws GpuUnavailableError or GpuCallError unless `result` is cudaSuccess. `call` is a literal.
  void check(cudaError_t result, const char* call);

  // The same without throwing: whether it is cudaSuccess. The error is taken back from the runtime,
  // so that no call of anybody else reports it.
  bool succeeded(cudaError_t result, const char* call) noexcept;

  // Nothing of this GPU can be relied on any more.
  void die(cudaError_t error, const char* call) noexcept;

 private:
  struct Death {
    cudaError_t error;
    const char* call;
  };

  static bool answers() noexcept;

  int ordinal_;
  Death first_death_{};
  std::atomic<bool> is_dying_{false};
  std::atomic<const Death*> death_{nullptr};  // first_death_, once it is written
};

// While it lives, calls of this thread do not break off a graph that another thread is capturing on
// streams of its own. To be taken around whatever creates, allocates, asks for an event or waits.
class BesideCaptures {
 public:
  BesideCaptures() noexcept { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the thread's own
};

// Makes the GPU current on this thread while it lives.
class CurrentGpu {
 public:
  explicit CurrentGpu(GpuContext& gpu) noexcept;
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

  bool is_current() const { return result_ == cudaSuccess; }
  void check() const;  // throws as GpuContext::check

 private:
  GpuContext& gpu_;
  BesideCaptures beside_captures_;
  cudaError_t result_ = cudaSuccess;
  int previous_ = 0;
  bool was_changed_ = false;
};

// Whether what is given to the stream becomes part of a graph, or would meddle with one that is being
// captured on another: then nobody can be told when it is over. The GPU must be current. Throws as
// GpuContext::check.
bool is_captured(GpuContext& gpu, cudaStream_t stream);

// Makes the GPU current on this thread for good. To change back would make the runtime set up the
// other GPU, with hundreds of megabytes, on a thread that never meant to use it.
void make_current(GpuContext& gpu);

}  // namespace pagedlora::cuda
