// The streams that copies run on. A copy has one for itself while it is under way; as many are made
// as copies were ever under way together.
//
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "gpu_context.h"

namespace pagedlora::cuda {

class CopyLanes {
 public:
  // A stream that waits for no other, and an event that is waited for without spinning.
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
  };

  explicit CopyLanes(std::shared_ptr<GpuContext> gpu) : gpu_(std::move(gpu)) {}
  ~CopyLanes();  // no lane is lent any more
  CopyLanes(const CopyLanes&) = delete;
  CopyLanes& operator=(const CopyLanes&) = delete;

  // The GPU must be current. Throws as GpuContext::check.
  Lane take();
  void give_back(const Lane& lane) noexcept;

  // Of a lane on which something failed: waits for what is on it all the same, so that it writes
  // nothing any more. If that cannot be found out, the GPU is taken for dead.
  void drain(const Lane& lane) noexcept;

 private:
  void destroy(const Lane& lane) noexcept;

  std::shared_ptr<GpuContext> gpu_;
  std::mutex mutex_;
  std::vector<Lane> free_;
};

}  // namespace pagedlora::cuda
