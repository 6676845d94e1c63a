// What has been launched on a stream, as a use of the pages that it reads.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu_context.h"
#include "pagedlora/page_use.h"

namespace pagedlora::cuda {

// Events are made once and lent again and again. Thread-safe.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<GpuContext> gpu) : gpu_(std::move(gpu)) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // The GPU must be current. Throws as GpuContext::check.
  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

  GpuContext& gpu() { return *gpu_; }

 private:
  std::shared_ptr<GpuContext> gpu_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class StreamWork final : public PageUse {
 public:
  // What `stream` has been given so far. The GPU must be current. Throws std::bad_alloc, and as
  // GpuContext::check.
  StreamWork(std::shared_ptr<EventPool> events, cudaStream_t stream);
  ~StreamWork() override;

  bool is_over() const override;

  bool is_of(const GpuContext& gpu) const { return &events_->gpu() == &gpu; }

  // Lets `stream` go on only when this is over. Throws as GpuContext::check.
  void hold_back(cudaStream_t stream) const;

 private:
  std::shared_ptr<EventPool> events_;
  cudaEvent_t event_;
  mutable std::atomic<bool> over_{false};
};

}  // namespace pagedlora::cuda
