#include "pagedlora/cuda/dlpack_memory.h"

#include <cstddef>
#include <limits>
#include <span>
#include <string>

#include "pagedlora/errors.h"

namespace pagedlora::cuda::dlpack {
namespace {

using Sizes = std::span<const std::int64_t>;

std::string text_of(Sizes sizes) {
  std::string text = "(";
  for (const std::int64_t size : sizes) {
    text += (text.size() == 1 ? "" : ", ") + std::to_string(size);
  }
  return text + ")";
}

std::string name_of(DeviceId device) {
  switch (device.type) {
    case kCpuDevice:
      return "the CPU";
    case kCudaDevice:
      return "cuda:" + std::to_string(device.ordinal);
    default:
      return "a device of DLPack's type " + std::to_string(device.type);
  }
}

Sizes sizes_at(const std::int64_t* first, const Tensor& tensor) {
  return first == nullptr ? Sizes() : Sizes(first, static_cast<std::size_t>(tensor.num_dimensions));
}

void check_is_contiguous(Sizes shape, Sizes strides) {
  std::int64_t wanted = 1;
  for (std::size_t i = strides.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != wanted) {
      throw InvalidArgumentError(
          "the memory given is a tensor of shape " + text_of(shape) + " with strides " +
          text_of(strides) +
          ", which has gaps or another order than that of its rows: give one "
          "that is contiguous");
    }
    wanted *= shape[i];
  }
}

// Throws if it is none, or more than an address can count.
std::size_t bytes_of(const Tensor& tensor, Sizes shape) {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t bits = std::uint64_t{tensor.element.bits} * tensor.element.lanes;
  for (const std::int64_t size : shape) {
    const auto factor = static_cast<std::uint64_t>(size);
    if (size < 0 || (factor != 0 && bits > kMost / factor)) {
      throw InvalidArgumentError("the memory given is a tensor of shape " + text_of(shape) +
                                 ", which no memory has");
    }
    bits *= factor;
  }
  if (bits < 8 || tensor.data == nullptr) {
    throw InvalidArgumentError("the memory given is a tensor of shape " + text_of(shape) +
                               " without a byte: give one as large as the device tier is to be");
  }
  return bits / 8;
}

}  // namespace

void check_device(DeviceId device, int ordinal) {
  if (device.type != kCudaDevice || device.ordinal != ordinal) {
    throw InvalidArgumentError("the memory given lies on " + name_of(device) +
                               ", the device is cuda:" + std::to_string(ordinal) +
                               ": give a tensor that was allocated on that GPU");
  }
}

GpuMemory memory_of(const Tensor& tensor, int ordinal) {
  check_device(tensor.device, ordinal);
  if (tensor.num_dimensions < 0 || (tensor.num_dimensions > 0 && tensor.shape == nullptr)) {
    throw InvalidArgumentError("the memory given is a tensor of " +
                               std::to_string(tensor.num_dimensions) + " dimensions without sizes");
  }
  const Sizes shape = sizes_at(tensor.shape, tensor);
  const std::size_t bytes = bytes_of(tensor, shape);
  check_is_contiguous(shape, sizes_at(tensor.strides, tensor));
  return {static_cast<std::byte*>(tensor.data) + tensor.byte_offset, bytes, nullptr};
}

GpuMemory memory_of(const ManagedTensor& managed, int ordinal) {
  return memory_of(managed.tensor, ordinal);
}

GpuMemory memory_of(const VersionedTensor& managed, int ordinal) {
  if (managed.version.major != kKnownMajorVersion) {
    throw InvalidArgumentError(
        "the memory given is a tensor by version " + std::to_string(managed.version.major) + "." +
        std::to_string(managed.version.minor) + " of DLPack; known are those of version 1");
  }
  if ((managed.flags & kIsReadOnly) != 0) {
    throw InvalidArgumentError(
        "the memory given is a tensor that may only be read: give one that "
        "may be written");
  }
  return memory_of(managed.tensor, ordinal);
}

}  // namespace pagedlora::cuda::dlpack
