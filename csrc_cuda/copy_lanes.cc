#include "copy_lanes.h"

namespace pagedlora::cuda {

CopyLanes::~CopyLanes() {
  for (const Lane& lane : free_) {
    destroy(lane);
  }
}

CopyLanes::Lane CopyLanes::take() {
  {
    const std::scoped_lock lock(mutex_);
    if (!free_.empty()) {
      const Lane lane = free_.back();
      free_.pop_back();
      return lane;
    }
  }
  Lane lane;
  try {
    gpu_->check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking),
                "cudaStreamCreateWithFlags");
    gpu_->check(
        cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming | cudaEventBlockingSync),
        "cudaEventCreateWithFlags");
  } catch (...) {
    destroy(lane);
    throw;
  }
  return lane;
}

void CopyLanes::give_back(const Lane& lane) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    free_.push_back(lane);
  } catch (const std::exception&) {  // out of memory
    destroy(lane);
  }
}

void CopyLanes::drain(const Lane& lane) noexcept {
  const cudaError_t result = cudaStreamSynchronize(lane.stream);
  if (!gpu_->succeeded(result, "cudaStreamSynchronize")) {
    gpu_->die(result, "cudaStreamSynchronize");
  }
  destroy(lane);
}

void CopyLanes::destroy(const Lane& lane) noexcept {
  if (lane.done != nullptr) {
    gpu_->succeeded(cudaEventDestroy(lane.done), "cudaEventDestroy");
  }
  if (lane.stream != nullptr) {
    gpu_->succeeded(cudaStreamDestroy(lane.stream), "cudaStreamDestroy");
  }
}

}  // namespace pagedlora::cuda
