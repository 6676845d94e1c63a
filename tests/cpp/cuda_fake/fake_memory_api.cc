// The runtime's functions for GPUs, errors and memory, as csrc_cuda calls them.
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "fake_runtime.h"

using pagedlora::fake_cuda::Allocation;
using pagedlora::fake_cuda::runtime;
using pagedlora::fake_cuda::Runtime;
using Lock = std::unique_lock<std::mutex>;

namespace {

constexpr std::size_t kMisalignment = 256;  // the least that the runtime promises
constexpr std::size_t kAddressSpace = std::size_t{1} << 47U;

std::byte* map_memory(std::size_t bytes, int protection) {
  void* memory =
      ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

std::size_t bytes_in_use(int gpu) {
  std::size_t bytes = 0;
  for (const auto& [begin, allocation] : runtime().allocations) {
    bytes += allocation.gpu == gpu ? allocation.bytes : 0;
  }
  return bytes;
}

bool has_room(std::size_t bytes, int gpu) {
  return bytes <= runtime().memory_bytes - bytes_in_use(gpu);
}

// What was on streams is through with it first.
cudaError_t free_memory(void* address, bool is_device) {
  Lock lock(runtime().mutex);
  const cudaError_t error = runtime().enter();
  if (address == nullptr) {
    return error;
  }
  runtime().wait_for(lock, [] { return runtime().is_idle(); });
  const auto found = runtime().allocations.find(static_cast<std::byte*>(address));
  if (found == runtime().allocations.end() || (found->second.gpu >= 0) != is_device) {
    runtime().violate("memory is freed that was not allocated so");
    return runtime().failed(cudaErrorInvalidValue);
  }
  found->second.free();
  runtime().allocations.erase(found);
  return error;
}

}  // namespace

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const Lock lock(runtime().mutex);
  *version = runtime().driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (runtime().driver_version < CUDART_VERSION) {
    return runtime().failed(cudaErrorInsufficientDriver);
  }
  *count = runtime().num_gpus;
  return *count > 0 ? cudaSuccess : runtime().failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* gpu) {
  const Lock lock(runtime().mutex);
  *gpu = Runtime::current_gpu;
  return runtime().enter();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*gpu*/) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (attribute != cudaDevAttrComputeCapabilityMajor) {
    runtime().violate("an attribute of a GPU that nobody knows");
  }
  *value = 9;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int gpu) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (gpu < 0 || gpu >= runtime().num_gpus) {
    return runtime().failed(cudaErrorInvalidDevice);
  }
  Runtime::current_gpu = gpu;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  runtime().num_pending_errors -= Runtime::last_error == cudaSuccess ? 0 : 1;
  return std::exchange(Runtime::last_error, cudaSuccess);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    default:
      return "cudaErrorOfAnotherName";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                          : "what the runtime says";
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  *total_bytes = runtime().memory_bytes;
  *free_bytes = runtime().memory_bytes - bytes_in_use(Runtime::current_gpu);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (!has_room(bytes, Runtime::current_gpu)) {
    return runtime().failed(cudaErrorMemoryAllocation);
  }
  const std::size_t mapped = bytes + kMisalignment;
  std::byte* reserved = map_memory(mapped, PROT_NONE);
  std::byte* content = map_memory(mapped, PROT_READ | PROT_WRITE);
  std::memset(content, 0xEE, mapped);
  const Allocation allocation{reserved + kMisalignment, bytes, Runtime::current_gpu,
                              content + kMisalignment, [=] {
                                ::munmap(reserved, mapped);
                                ::munmap(content, mapped);
                              }};
  runtime().allocations.emplace(allocation.begin, allocation);
  *address = allocation.begin;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) { return free_memory(address, true); }

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned int flags) {
  const Lock lock(runtime().mutex);
  runtime().check_beside_captures();
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (flags != (cudaHostAllocPortable | cudaHostAllocMapped)) {
    runtime().violate("pinned memory that not every GPU can read");
  }
  if (bytes > kAddressSpace) {
    return runtime().failed(cudaErrorInvalidValue);
  }
  if (!has_room(bytes, -1)) {
    return runtime().failed(cudaErrorMemoryAllocation);
  }
  std::byte* memory = map_memory(bytes, PROT_READ | PROT_WRITE);
  std::memset(memory, 0xDD, bytes);
  runtime().allocations.emplace(
      memory, Allocation{memory, bytes, -1, memory, [=] { ::munmap(memory, bytes); }});
  *address = memory;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) { return free_memory(address, false); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  const Allocation* allocation = runtime().allocation_of(address, 1);
  *attributes = {};
  attributes->type = allocation == nullptr  ? cudaMemoryTypeUnregistered
                     : allocation->gpu >= 0 ? cudaMemoryTypeDevice
                                            : cudaMemoryTypeHost;
  attributes->device = allocation == nullptr ? -1 : allocation->gpu;
  return cudaSuccess;
}
