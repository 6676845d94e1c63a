#include "gpu_buffers.h"

namespace pagedlora::cuda {

DeviceBuffer::DeviceBuffer(GpuContext& gpu, std::size_t bytes) : gpu_(gpu), bytes_(bytes) {
  const CurrentGpu current(gpu);
  current.check();
  gpu.check(cudaMalloc(&begin_, bytes), "cudaMalloc");
}

DeviceBuffer::~DeviceBuffer() {
  const CurrentGpu current(gpu_);
  gpu_.succeeded(cudaFree(begin_), "cudaFree");
}

PinnedBuffer::PinnedBuffer(GpuContext& gpu, std::size_t bytes) : gpu_(gpu), bytes_(bytes) {
  const CurrentGpu current(gpu);
  current.check();
  gpu.check(cudaHostAlloc(&begin_, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
            "cudaHostAlloc");
}

PinnedBuffer::~PinnedBuffer() {
  const CurrentGpu current(gpu_);
  gpu_.succeeded(cudaFreeHost(begin_), "cudaFreeHost");
}

}  // namespace pagedlora::cuda
