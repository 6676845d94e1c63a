#include "gpu_context.h"

#include "pagedlora/errors.h"

namespace pagedlora::cuda {

bool leaves_gpu_unusable(cudaError_t error) {
  switch (error) {
    case cudaErrorCudartUnloading:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

// A call that needs a working GPU and changes nothing.
bool GpuContext::answers() noexcept {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    return true;
  }
  cudaGetLastError();
  return false;
}

void GpuContext::check_alive() const {
  const Death* death = death_.load(std::memory_order_acquire);
  if (death != nullptr) {
    throw GpuUnavailableError("cuda:" + std::to_string(ordinal_) + " has failed: " + death->call +
                              " returned " + cudaGetErrorName(death->error) + ", " +
                              cudaGetErrorString(death->error) + "; restart the process");
  }
}

void GpuContext::check(cudaError_t result, const char* call) {
  if (!succeeded(result, call)) {
    check_alive();
    throw GpuCallError(call, cudaGetErrorName(result), cudaGetErrorString(result));
  }
}

bool GpuContext::succeeded(cudaError_t result, const char* call) noexcept {
  if (result == cudaSuccess) {
    return true;
  }
  cudaGetLastError();
  if (leaves_gpu_unusable(result) || !answers()) {
    die(result, call);
  }
  return false;
}

void GpuContext::die(cudaError_t error, const char* call) noexcept {
  if (!is_dying_.exchange(true)) {
    first_death_ = {error, call};
    death_.store(&first_death_, std::memory_order_release);
  }
}

CurrentGpu::CurrentGpu(GpuContext& gpu) noexcept : gpu_(gpu) {
  result_ = cudaGetDevice(&previous_);
  if (result_ == cudaSuccess && previous_ != gpu.ordinal()) {
    result_ = cudaSetDevice(gpu.ordinal());
    was_changed_ = result_ == cudaSuccess;
  }
  gpu_.succeeded(result_, "cudaSetDevice");
}

CurrentGpu::~CurrentGpu() {
  if (was_changed_ && cudaSetDevice(previous_) != cudaSuccess) {
    cudaGetLastError();
  }
}

void CurrentGpu::check() const { gpu_.check(result_, "cudaSetDevice"); }

bool is_captured(GpuContext& gpu, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(stream, &status);
  if (result == cudaErrorStreamCaptureImplicit) {  // the legacy stream, which waits for all others
    cudaGetLastError();
    return true;
  }
  gpu.check(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void make_current(GpuContext& gpu) {
  int current = 0;
  gpu.check(cudaGetDevice(&current), "cudaGetDevice");
  if (current != gpu.ordinal()) {
    gpu.check(cudaSetDevice(gpu.ordinal()), "cudaSetDevice");
  }
}

}  // namespace pagedlora::cuda
