#include "stream_work.h"

#include <utility>

namespace pagedlora::cuda {

EventPool::~EventPool() {
  for (const cudaEvent_t event : free_) {
    gpu_->succeeded(cudaEventDestroy(event), "cudaEventDestroy");
  }
}

cudaEvent_t EventPool::take() {
  {
    const std::scoped_lock lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  gpu_->check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    free_.push_back(event);
  } catch (const std::exception&) {  // out of memory
    gpu_->succeeded(cudaEventDestroy(event), "cudaEventDestroy");
  }
}

StreamWork::StreamWork(std::shared_ptr<EventPool> events, cudaStream_t stream)
    : events_(std::move(events)), event_(events_->take()) {
  try {
    events_->gpu().check(cudaEventRecord(event_, stream), "cudaEventRecord");
  } catch (...) {
    events_->give_back(event_);
    throw;
  }
}

// Streams that were held back by the event go by what it was then.
StreamWork::~StreamWork() { events_->give_back(event_); }

// A GPU that has failed runs nothing any more.
bool StreamWork::is_over() const {
  if (over_ || events_->gpu().is_dead()) {
    return true;
  }
  const BesideCaptures beside_captures;
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  if (events_->gpu().succeeded(result, "cudaEventQuery")) {
    over_ = true;
  } else if (result == cudaErrorInvalidResourceHandle) {
    events_->gpu().die(result, "cudaEventQuery");  // somebody has reset the GPU
  }
  return over_ || events_->gpu().is_dead();
}

void StreamWork::hold_back(cudaStream_t stream) const {
  if (!over_) {
    events_->gpu().check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
}

}  // namespace pagedlora::cuda
