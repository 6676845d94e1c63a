// Memory of one size that is kept for good: of the GPU, and of the host where the GPU can read it.
//
// They make the GPU current themselves. The constructors throw as GpuContext::check.
#pragma once

#include <cstddef>

#include "gpu_context.h"

namespace pagedlora::cuda {

class DeviceBuffer {
 public:
  DeviceBuffer(GpuContext& gpu, std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* begin() const { return static_cast<std::byte*>(begin_); }
  std::size_t bytes() const { return bytes_; }

 private:
  GpuContext& gpu_;
  std::size_t bytes_;
  void* begin_ = nullptr;
};

// Pinned and mapped: its address is the same for kernels.
class PinnedBuffer {
 public:
  PinnedBuffer(GpuContext& gpu, std::size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* begin() const { return static_cast<std::byte*>(begin_); }
  std::size_t bytes() const { return bytes_; }

 private:
  GpuContext& gpu_;
  std::size_t bytes_;
  void* begin_ = nullptr;
};

}  // namespace pagedlora::cuda
