// A stream of a GPU as Python gives it.
#pragma once

#include <pybind11/pybind11.h>

#include <bit>
#include <cstdint>

#include "argument.h"

namespace pagedlora::bindings {

// None: no stream. Else an object of torch, or the number of a stream; 0 is torch's default stream,
// which is the runtime's cudaStreamLegacy and not "no stream".
inline void* stream_argument(const pybind11::object& stream) {
  constexpr std::uintptr_t kLegacyStream = 1;
  if (stream.is_none()) {
    return nullptr;
  }
  const pybind11::object address = pybind11::getattr(stream, "cuda_stream", stream);
  pybind11::detail::make_caster<
      Argument<std::uintptr_t, "stream", "a stream of torch, or its number">>
      caster;
  caster.load(address, true);
  const std::uintptr_t number =
      pybind11::detail::cast_op<
          Argument<std::uintptr_t, "stream", "a stream of torch, or its number">>(caster)
          .value;
  return std::bit_cast<void*>(number == 0 ? kLegacyStream : number);
}

}  // namespace pagedlora::bindings
