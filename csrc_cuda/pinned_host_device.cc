#include "pinned_host_device.h"

#include <utility>

namespace pagedlora::cuda {
namespace {

class PinnedHostDevice final : public Device {
 public:
  explicit PinnedHostDevice(std::shared_ptr<GpuContext> gpu) : gpu_(std::move(gpu)) {}

  std::string_view name() const override { return "pinned"; }
  MemoryInfo memory_info() const override { return cpu_->memory_info(); }
  bool is_host_memory() const override { return true; }

  std::byte* try_allocate(std::size_t bytes) override {
    gpu_->check_alive();
    if (bytes > cpu_->memory_info().total_bytes) {
      return nullptr;  // the runtime may call it an invalid argument
    }
    const CurrentGpu current(*gpu_);
    current.check();
    void* arena = nullptr;
    // Portable: pinned for every GPU. Mapped: kernels can read it. Aligned to whole memory pages.
    const cudaError_t result =
        cudaHostAlloc(&arena, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (result == cudaErrorMemoryAllocation && !gpu_->succeeded(result, "cudaHostAlloc")) {
      gpu_->check_alive();
      return nullptr;
    }
    gpu_->check(result, "cudaHostAlloc");
    return static_cast<std::byte*>(arena);
  }

  void deallocate(std::byte* arena, std::size_t /*bytes*/) noexcept override {
    const BesideCaptures beside_captures;
    gpu_->succeeded(cudaFreeHost(arena), "cudaFreeHost");
  }

  void prefault(std::byte* /*begin*/, std::size_t /*bytes*/) noexcept override {}

  void copy_from_host(std::span<const CopyRun> runs) override { cpu_->copy_from_host(runs); }
  void copy_to_host(std::span<const CopyRun> runs) override { cpu_->copy_to_host(runs); }

 private:
  std::shared_ptr<GpuContext> gpu_;
  std::shared_ptr<Device> cpu_ = make_host_device();
};

}  // namespace

std::shared_ptr<Device> make_pinned_host_device(std::shared_ptr<GpuContext> gpu) {
  return std::make_shared<PinnedHostDevice>(std::move(gpu));
}

}  // namespace pagedlora::cuda
