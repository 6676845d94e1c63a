// Memory of ours as a tensor for other libraries, by DLPack's C interface (its version without a
// version number, which all of them take).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace pagedlora::bindings {

// A capsule for `from_dlpack`: [bytes] of uint8 at `address`, without a copy. `owner` lives until
// the last tensor made of it is gone. The memory is that of the CUDA device `ordinal`, or the CPU's.
pybind11::capsule to_dlpack(std::uintptr_t address, std::size_t bytes, std::optional<int> ordinal,
                            std::shared_ptr<const void> owner);

}  // namespace pagedlora::bindings
