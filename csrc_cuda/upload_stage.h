// What a step tells the GPU, on its way there: pinned memory, so that nobody waits for the stream.
//
// The stream reads the stage when it comes to the copy, which may be behind the kernels of the step
// before. So the next upload first waits until the last one has been read: nearly always it has.
//
// Thread-compatible. The GPU must be current in every call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "gpu_context.h"

namespace pagedlora::cuda {

class UploadStage {
 public:
  // Throws as GpuContext::check.
  UploadStage(GpuContext& gpu, std::size_t bytes);
  ~UploadStage();  // waits for what is on its way
  UploadStage(const UploadStage&) = delete;
  UploadStage& operator=(const UploadStage&) = delete;

  std::size_t bytes() const { return bytes_; }

  // Copies at most bytes() to the GPU's `target`, in the order of the stream; `content` may be
  // changed when it returns. Throws as GpuContext::check; nothing is on its way then.
  void upload(std::span<const std::byte> content, std::byte* target, cudaStream_t stream);

 private:
  void wait_until_read();

  GpuContext& gpu_;
  std::size_t bytes_;
  void* begin_ = nullptr;
  cudaEvent_t read_ = nullptr;  // is waited for without spinning
  bool is_on_its_way_ = false;  // `read_` says whether it still is
};

}  // namespace pagedlora::cuda
