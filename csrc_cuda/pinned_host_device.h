// Host memory that the GPU copies from and to at full speed and that its kernels can read: what the
// host tier beside a GPU lives in.
#pragma once

#include <memory>

#include "gpu_context.h"
#include "pagedlora/device.h"

namespace pagedlora::cuda {

// Arenas are page-locked and present from the start; where the system does not allow so much, there
// is no room. Copies are the CPU's. try_allocate() throws where the GPU has failed.
std::shared_ptr<Device> make_pinned_host_device(std::shared_ptr<GpuContext> gpu);

}  // namespace pagedlora::cuda
