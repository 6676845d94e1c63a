#include "upload_stage.h"

#include <cstring>

namespace pagedlora::cuda {

UploadStage::UploadStage(GpuContext& gpu, std::size_t bytes) : gpu_(gpu), bytes_(bytes) {
  gpu.check(cudaHostAlloc(&begin_, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
            "cudaHostAlloc");
  const cudaError_t result =
      cudaEventCreateWithFlags(&read_, cudaEventDisableTiming | cudaEventBlockingSync);
  if (!gpu.succeeded(result, "cudaEventCreateWithFlags")) {
    gpu.succeeded(cudaFreeHost(begin_), "cudaFreeHost");
    gpu.check(result, "cudaEventCreateWithFlags");
  }
}

UploadStage::~UploadStage() {
  if (is_on_its_way_) {
    gpu_.succeeded(cudaEventSynchronize(read_), "cudaEventSynchronize");
  }
  gpu_.succeeded(cudaEventDestroy(read_), "cudaEventDestroy");
  gpu_.succeeded(cudaFreeHost(begin_), "cudaFreeHost");
}

void UploadStage::wait_until_read() {
  if (is_on_its_way_) {
    gpu_.check(cudaEventSynchronize(read_), "cudaEventSynchronize");
    is_on_its_way_ = false;
  }
}

void UploadStage::upload(std::span<const std::byte> content, std::byte* target,
                         cudaStream_t stream) {
  wait_until_read();
  std::memcpy(begin_, content.data(), content.size());
  gpu_.check(cudaMemcpyAsync(target, begin_, content.size(), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  const cudaError_t result = cudaEventRecord(read_, stream);
  if (!gpu_.succeeded(result, "cudaEventRecord")) {
    const cudaError_t waited = cudaStreamSynchronize(stream);
    if (!gpu_.succeeded(waited, "cudaStreamSynchronize")) {
      gpu_.die(waited, "cudaStreamSynchronize");  // nobody knows what is still read
    }
    gpu_.check(result, "cudaEventRecord");
  }
  is_on_its_way_ = true;
}

}  // namespace pagedlora::cuda
