// Whether this process can use a GPU, and if not, why not.
//
// Pure queries; thread-safe. None of them creates a context on a device.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pagedlora::cuda {

enum class GpuState : std::uint8_t {
  available,
  no_driver,       // there is no NVIDIA driver on this machine
  driver_too_old,  // there is one, for an older CUDA than the runtime of this build
  no_device,       // the driver sees no GPU, or CUDA_VISIBLE_DEVICES hides all
  broken,          // anything else that the runtime said; GpuSupport::detail has its words
};

constexpr std::string_view gpu_state_name(GpuState state) {
  switch (state) {
    case GpuState::available:
      return "available";
    case GpuState::no_driver:
      return "no driver";
    case GpuState::driver_too_old:
      return "driver too old";
    case GpuState::no_device:
      return "no device";
    case GpuState::broken:
      return "broken";
  }
  return "unknown";
}

struct GpuSupport {
  GpuState state = GpuState::broken;
  int num_devices = 0;
  int driver_version = 0;   // of CUDA that the driver is for, 13000 for 13.0; 0: no driver
  int runtime_version = 0;  // of CUDA that this build has linked
  std::string detail;       // a sentence for a person: what is wrong and what to do; empty: nothing
};

// Asks the runtime anew each time.
GpuSupport gpu_support();

}  // namespace pagedlora::cuda
