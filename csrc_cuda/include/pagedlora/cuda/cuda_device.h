// A GPU as the device of the device tier (pagedlora/device.h), by the CUDA runtime alone.
//
// Copies run on streams of their own beside what the caller computes, one stream to a copy that is
// under way. They are fastest with the memory of host_tier_device(), which is pinned; any other
// host memory may be given. A copy to the GPU can be queued behind what launched_work() returned.
// Copies under 16 MiB keep the calling thread busy for up to half a millisecond; then, and with
// larger ones, it sleeps until they are done.
//
// The work that was launched on a stream is over when the GPU is through with it. Without a stream
// launched_work() waits for the whole GPU. cudaStreamLegacy and cudaStreamPerThread are streams. One
// that is being captured into a graph is refused (InvalidArgumentError) and left alone, as is
// cudaStreamLegacy while a stream that it waits for is captured: launches of a graph are no work of
// the stream that it was captured on.
//
// Failures. Memory that is not there: try_allocate() returns nullptr. A call that fails and leaves
// the GPU usable: GpuCallError. One after which the GPU cannot be used (an illegal address in some
// kernel, say, whoever launched it): the device is dead, and this and every later call throws
// GpuUnavailableError with that reason; only a new process can use the GPU again. After either, the
// bytes of the failed copy are unspecified, and nothing writes them any more.
//
// Another GPU may be current on the calling thread. Calls leave it so, except for copies, which
// leave this one current: they belong on threads that do nothing else.
//
// Thread-safe for distinct memory ranges.
#pragma once

#include <cstddef>
#include <memory>

#include "pagedlora/device.h"

namespace pagedlora::cuda {

// Memory of the GPU that somebody else allocated, such as a tensor of torch (dlpack_memory.h).
struct GpuMemory {
  void* begin = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> owner;  // kept until the last arena is given back and the device gone
};

struct CudaDeviceOptions {
  int ordinal = 0;
  // Where arenas come from: one at a time, of at most bytes - 4095. What has been launched on the
  // GPU is waited for first. memory_info() is that of this memory then. Empty: from the runtime.
  GpuMemory memory{};
};

// Throws GpuUnavailableError, saying why, if there is no such GPU or it does not answer;
// InvalidArgumentError if `memory` is not memory of this GPU.
std::shared_ptr<Device> make_cuda_device(CudaDeviceOptions options = {});

}  // namespace pagedlora::cuda
