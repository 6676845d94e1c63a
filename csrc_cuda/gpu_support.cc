#include "pagedlora/cuda/gpu_support.h"

#include <cuda_runtime_api.h>

namespace pagedlora::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The runtime says "insufficient driver" both for an old driver and for none at all.
GpuState state_of(cudaError_t error, const GpuSupport& found) {
  switch (error) {
    case cudaSuccess:
      return found.num_devices > 0 ? GpuState::available : GpuState::no_device;
    case cudaErrorInsufficientDriver:
      return found.driver_version == 0 ? GpuState::no_driver : GpuState::driver_too_old;
    case cudaErrorStubLibrary:
      return GpuState::no_driver;
    case cudaErrorNoDevice:
      return GpuState::no_device;
    default:
      return GpuState::broken;
  }
}

std::string detail_of(const GpuSupport& found, cudaError_t error) {
  switch (found.state) {
    case GpuState::available:
      return {};
    case GpuState::no_driver:
      return "there is no NVIDIA driver on this machine: install one for CUDA " +
             version_text(found.runtime_version) + " or newer";
    case GpuState::driver_too_old:
      return "the NVIDIA driver is for CUDA " + version_text(found.driver_version) +
             ", this build needs " + version_text(found.runtime_version) + ": update the driver";
    case GpuState::no_device:
      return "the NVIDIA driver sees no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES";
    case GpuState::broken:
      break;
  }
  return std::string("CUDA says ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
}

}  // namespace

GpuSupport gpu_support() {
  GpuSupport found;
  cudaRuntimeGetVersion(&found.runtime_version);
  if (cudaDriverGetVersion(&found.driver_version) != cudaSuccess) {
    found.driver_version = 0;
  }
  const cudaError_t error = cudaGetDeviceCount(&found.num_devices);
  if (error != cudaSuccess) {
    found.num_devices = 0;
    cudaGetLastError();  // taken back, so that no later call of anybody reports it
  }
  found.state = state_of(error, found);
  found.detail = detail_of(found, error);
  return found;
}

}  // namespace pagedlora::cuda
