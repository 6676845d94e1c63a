// Arenas in the memory of a GPU, aligned to 4096 bytes: each an allocation of its own, or one at a
// time in memory that somebody else allocated.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "gpu_context.h"
#include "pagedlora/cuda/cuda_device.h"

namespace pagedlora::cuda {

class GpuArenas {
 public:
  GpuArenas(GpuContext& gpu, GpuMemory memory) : gpu_(gpu), memory_(std::move(memory)) {}
  GpuArenas(const GpuArenas&) = delete;
  GpuArenas& operator=(const GpuArenas&) = delete;

  // nullptr if there is no room. Throws as GpuContext::check.
  std::byte* try_allocate(std::size_t bytes);
  void deallocate(std::byte* arena) noexcept;

  // Of given memory: its size, and what an arena can have of it now.
  std::optional<MemoryInfo> given_memory_info() const;

 private:
  std::byte* try_take_given(std::size_t bytes);
  std::byte* try_allocate_own(std::size_t bytes);

  GpuContext& gpu_;
  const GpuMemory memory_;
  mutable std::mutex mutex_;
  std::byte* given_arena_ = nullptr;                   // that is in use
  std::unordered_map<std::byte*, void*> allocations_;  // where each arena's allocation begins
};

}  // namespace pagedlora::cuda
