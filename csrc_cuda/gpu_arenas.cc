#include "gpu_arenas.h"

#include <limits>
#include <memory>

namespace pagedlora::cuda {
namespace {

constexpr std::size_t kArenaAlignment = 4096;  // the runtime promises 256

// nullptr if it does not fit.
std::byte* aligned_within(void* begin, std::size_t bytes, std::size_t wanted_bytes) {
  return static_cast<std::byte*>(std::align(kArenaAlignment, wanted_bytes, begin, bytes));
}

}  // namespace

std::byte* GpuArenas::try_allocate(std::size_t bytes) {
  gpu_.check_alive();
  return memory_.bytes != 0 ? try_take_given(bytes) : try_allocate_own(bytes);
}

std::byte* GpuArenas::try_take_given(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  if (given_arena_ != nullptr) {
    return nullptr;
  }
  given_arena_ = aligned_within(memory_.begin, memory_.bytes, bytes);
  return given_arena_;
}

std::optional<MemoryInfo> GpuArenas::given_memory_info() const {
  if (memory_.bytes == 0) {
    return std::nullopt;
  }
  const std::byte* first = aligned_within(memory_.begin, memory_.bytes, 1);
  const std::size_t lost =
      first == nullptr ? memory_.bytes
                       : static_cast<std::size_t>(first - static_cast<std::byte*>(memory_.begin));
  const std::scoped_lock lock(mutex_);
  return MemoryInfo{given_arena_ != nullptr ? 0 : memory_.bytes - lost, memory_.bytes};
}

std::byte* GpuArenas::try_allocate_own(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kArenaAlignment) {
    return nullptr;
  }
  const CurrentGpu current(gpu_);
  current.check();
  const std::size_t allocated_bytes = bytes + kArenaAlignment - 1;
  void* allocation = nullptr;
  const cudaError_t result = cudaMalloc(&allocation, allocated_bytes);
  if (result == cudaErrorMemoryAllocation && !gpu_.succeeded(result, "cudaMalloc")) {
    gpu_.check_alive();
    return nullptr;
  }
  gpu_.check(result, "cudaMalloc");
  std::byte* arena = aligned_within(allocation, allocated_bytes, bytes);
  try {
    const std::scoped_lock lock(mutex_);
    allocations_.emplace(arena, allocation);
  } catch (...) {
    gpu_.succeeded(cudaFree(allocation), "cudaFree");
    throw;
  }
  return arena;
}

// Kernels of a closed lease may still read it: cudaFree waits for them, whoever has given the
// memory would not.
void GpuArenas::deallocate(std::byte* arena) noexcept {
  if (memory_.bytes != 0) {
    const CurrentGpu current(gpu_);
    gpu_.succeeded(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const std::scoped_lock lock(mutex_);
    given_arena_ = nullptr;
    return;
  }
  const BesideCaptures beside_captures;
  void* allocation = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = allocations_.find(arena);
    allocation = found->second;
    allocations_.erase(found);
  }
  gpu_.succeeded(cudaFree(allocation), "cudaFree");
}

}  // namespace pagedlora::cuda
