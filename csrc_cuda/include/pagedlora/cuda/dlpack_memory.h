// Memory of a GPU in the form in which libraries hand tensors to each other: DLPack
// (https://dmlc.github.io/dlpack), as far as it takes to use a tensor's bytes as GpuMemory.
//
// The structs have the layout of DLPack 1.x and of the versions before it had a number. Whoever
// takes a managed tensor over calls its deleter, if it has one, once, from any thread.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>

#include "pagedlora/cuda/cuda_device.h"

namespace pagedlora::cuda::dlpack {

inline constexpr std::int32_t kCpuDevice = 1;
inline constexpr std::int32_t kCudaDevice = 2;

struct DeviceId {
  std::int32_t type;
  std::int32_t ordinal;
};

struct ElementType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  DeviceId device;
  std::int32_t num_dimensions;
  ElementType element;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements; null: row after row without gaps
  std::uint64_t byte_offset;    // of the first element from `data`
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint32_t kKnownMajorVersion = 1;  // minor ones do not change the layout
inline constexpr std::uint64_t kIsReadOnly = 1;         // a flag

struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

// Throws InvalidArgumentError, with both, if it is not that GPU.
void check_device(DeviceId device, int ordinal);

// The bytes of a tensor on that GPU, without an owner. Throws InvalidArgumentError, saying what is
// wrong and what to give, for another device, gaps between elements or another order than that of
// rows, no bytes, a tensor that may not be written, or a version of which the layout is unknown.
GpuMemory memory_of(const Tensor& tensor, int ordinal);
GpuMemory memory_of(const ManagedTensor& managed, int ordinal);
GpuMemory memory_of(const VersionedTensor& managed, int ordinal);

}  // namespace pagedlora::cuda::dlpack
