#include "pagedlora/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy_lanes.h"
#include "copy_queue.h"
#include "gpu_arenas.h"
#include "gpu_context.h"
#include "pagedlora/cuda/gpu_support.h"
#include "pagedlora/errors.h"
#include "pinned_host_device.h"
#include "stream_work.h"

namespace pagedlora::cuda {
namespace {

// How often it is asked whether another thread's capture of a graph has ended, and for how long.
constexpr std::chrono::milliseconds kLookAgain{1};
constexpr std::chrono::seconds kLongestCapture{10};

// A copy of fewer bytes is asked for whether it is over, for so long, before it is waited for: a
// thread that sleeps takes tens of microseconds to wake up, about as long as the copy.
constexpr std::size_t kShortCopyBytes = std::size_t{16} << 20U;
constexpr std::chrono::microseconds kLongestPolling{500};

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<GpuContext> gpu, GpuMemory memory)
      : gpu_(std::move(gpu)),
        name_("cuda:" + std::to_string(gpu_->ordinal())),
        arenas_(*gpu_, std::move(memory)),
        lanes_(gpu_),
        copies_(*gpu_) {}

  std::string_view name() const override { return name_; }

  MemoryInfo memory_info() const override {
    gpu_->check_alive();
    if (const std::optional<MemoryInfo> given = arenas_.given_memory_info()) {
      return *given;
    }
    const CurrentGpu current(*gpu_);
    current.check();
    MemoryInfo info;
    gpu_->check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "cudaMemGetInfo");
    return info;
  }

  std::byte* try_allocate(std::size_t bytes) override { return arenas_.try_allocate(bytes); }
  void deallocate(std::byte* arena, std::size_t /*bytes*/) noexcept override {
    arenas_.deallocate(arena);
  }
  void prefault(std::byte* /*begin*/, std::size_t /*bytes*/) noexcept override {}

  std::shared_ptr<Device> host_tier_device() override { return make_pinned_host_device(gpu_); }

  bool is_cpu_readable() const override { return false; }

  std::shared_ptr<const PageUse> launched_work(void* stream) override;

  void copy_from_host(std::span<const CopyRun> runs) override {
    copy(runs, cudaMemcpyHostToDevice, {});
  }
  void copy_to_host(std::span<const CopyRun> runs) override {
    copy(runs, cudaMemcpyDeviceToHost, {});
  }

  bool can_queue_behind(const PageUse& use) const override {
    const auto* work = dynamic_cast<const StreamWork*>(&use);
    return work != nullptr && work->is_of(*gpu_);
  }
  void copy_from_host_behind(const PageUses& uses, std::span<const CopyRun> runs) override {
    copy(runs, cudaMemcpyHostToDevice, uses);
  }

 private:
  void copy(std::span<const CopyRun> runs, cudaMemcpyKind kind, const PageUses& behind);
  void run_on(const CopyLanes::Lane& lane, std::span<const CopyRun> runs, cudaMemcpyKind kind,
              const PageUses& behind);
  void wait_for(const CopyLanes::Lane& lane, std::size_t bytes);
  void wait_for_all() noexcept;
  void check_is_not_captured(cudaStream_t stream);

  std::shared_ptr<GpuContext> gpu_;
  std::string name_;
  GpuArenas arenas_;
  CopyLanes lanes_;
  CopyQueue copies_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(gpu_);
};

// What cannot be told by an event is waited for. On a stream that is being captured neither can be
// done, and the capture may be the caller's: it is told so.
std::shared_ptr<const PageUse> CudaDevice::launched_work(void* stream) {
  if (gpu_->is_dead()) {
    return nullptr;  // nothing runs on it, and nothing will be written
  }
  const CurrentGpu current(*gpu_);
  std::shared_ptr<const PageUse> work;
  if (stream != nullptr && current.is_current()) {
    try {
      check_is_not_captured(static_cast<cudaStream_t>(stream));
      work = std::make_shared<StreamWork>(events_, static_cast<cudaStream_t>(stream));
    } catch (const InvalidArgumentError&) {
      throw;
    } catch (const std::exception&) {
      work = nullptr;  // no event to be had
    }
  }
  if (work == nullptr) {
    wait_for_all();
  }
  return work;
}

void CudaDevice::check_is_not_captured(cudaStream_t stream) {
  if (is_captured(*gpu_, stream)) {
    throw InvalidArgumentError("a stream of " + name_ +
                               " is being captured into a graph, and cannot tell when its kernels "
                               "are over: close the lease after the capture, or on another stream");
  }
}

void CudaDevice::wait_for_all() noexcept {
  const auto end = std::chrono::steady_clock::now() + kLongestCapture;
  cudaError_t result = cudaDeviceSynchronize();
  while (result == cudaErrorStreamCaptureUnsupported && std::chrono::steady_clock::now() < end) {
    cudaGetLastError();
    std::this_thread::sleep_for(kLookAgain);
    result = cudaDeviceSynchronize();
  }
  if (!gpu_->succeeded(result, "cudaDeviceSynchronize")) {
    gpu_->die(result, "cudaDeviceSynchronize");  // nobody knows what is still read
  }
}

void CudaDevice::copy(std::span<const CopyRun> runs, cudaMemcpyKind kind, const PageUses& behind) {
  gpu_->check_alive();
  std::vector<CopyRun> wanted;
  wanted.reserve(runs.size());
  for (const CopyRun& run : runs) {
    if (run.bytes != 0) {
      wanted.push_back(run);
    }
  }
  if (wanted.empty()) {
    return;
  }
  const BesideCaptures beside_captures;
  make_current(*gpu_);
  const CopyLanes::Lane lane = lanes_.take();
  try {
    run_on(lane, wanted, kind, behind);
  } catch (...) {
    lanes_.drain(lane);
    throw;
  }
  lanes_.give_back(lane);
}

void CudaDevice::run_on(const CopyLanes::Lane& lane, std::span<const CopyRun> runs,
                        cudaMemcpyKind kind, const PageUses& behind) {
  for (const std::shared_ptr<const PageUse>& use : behind) {
    dynamic_cast<const StreamWork&>(*use).hold_back(lane.stream);
  }
  copies_.enqueue(runs, kind, lane.stream);
  gpu_->check(cudaEventRecord(lane.done, lane.stream), "cudaEventRecord");
  std::size_t bytes = 0;
  for (const CopyRun& run : runs) {
    bytes += run.bytes;
  }
  wait_for(lane, bytes);
}

void CudaDevice::wait_for(const CopyLanes::Lane& lane, std::size_t bytes) {
  if (bytes < kShortCopyBytes) {
    const auto end = std::chrono::steady_clock::now() + kLongestPolling;
    do {
      const cudaError_t result = cudaEventQuery(lane.done);
      if (result != cudaErrorNotReady) {
        gpu_->check(result, "cudaEventQuery");
        return;
      }
      cudaGetLastError();
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
  }
  gpu_->check(cudaEventSynchronize(lane.done), "cudaEventSynchronize");
}

void check_is_of_gpu(const GpuMemory& memory, GpuContext& gpu) {
  cudaPointerAttributes attributes{};
  gpu.check(cudaPointerGetAttributes(&attributes, memory.begin), "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != gpu.ordinal()) {
    throw InvalidArgumentError("the memory given for the device tier is not memory of cuda:" +
                               std::to_string(gpu.ordinal()) +
                               ": give a tensor that was allocated on that GPU");
  }
}

}  // namespace

std::shared_ptr<Device> make_cuda_device(CudaDeviceOptions options) {
  const GpuSupport support = gpu_support();
  if (support.state != GpuState::available) {
    throw GpuUnavailableError(support.detail);
  }
  if (options.ordinal < 0 || options.ordinal >= support.num_devices) {
    throw GpuUnavailableError("cuda:" + std::to_string(options.ordinal) +
                              " is not one of the GPUs that this process sees, which are " +
                              std::to_string(support.num_devices) + ", counted from 0");
  }
  const auto gpu = std::make_shared<GpuContext>(options.ordinal);
  try {
    const CurrentGpu current(*gpu);
    current.check();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    gpu->check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    if (options.memory.bytes != 0) {
      check_is_of_gpu(options.memory, *gpu);
      // Whoever gives it may have launched something that writes it, on a stream that ours do not
      // wait for.
      gpu->check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
  } catch (const GpuCallError& error) {
    throw GpuUnavailableError("cuda:" + std::to_string(options.ordinal) +
                              " does not answer: " + error.what());
  }
  return std::make_shared<CudaDevice>(gpu, std::move(options.memory));
}

}  // namespace pagedlora::cuda
