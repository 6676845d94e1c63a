// Copies given to a stream, one by one or all in one call.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <span>

#include "gpu_context.h"
#include "pagedlora/device.h"

namespace pagedlora::cuda {

class CopyQueue {
 public:
  explicit CopyQueue(GpuContext& gpu) : gpu_(gpu) {}

  // In any order, behind what is on the stream. Runs are not empty. Throws as GpuContext::check;
  // some of the copies may be on the stream then.
  void enqueue(std::span<const CopyRun> runs, cudaMemcpyKind kind, cudaStream_t stream);

 private:
  bool try_enqueue_batch(std::span<const CopyRun> runs, cudaStream_t stream);

  GpuContext& gpu_;
  std::atomic<bool> has_batches_{true};  // as far as is known
};

}  // namespace pagedlora::cuda
