// Memory of a GPU as Python gives it: any object with __dlpack__, such as a tensor of torch.
//
// Caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "pagedlora/cuda/dlpack_memory.h"
#include "pagedlora/errors.h"

namespace pagedlora::bindings {

namespace internal {

// The capsule with the newest layout that the object knows.
inline pybind11::object dlpack_capsule_of(const pybind11::object& exporter) {
  const pybind11::object method = exporter.attr("__dlpack__");
  try {
    return method(pybind11::arg("max_version") =
                      pybind11::make_tuple(cuda::dlpack::kKnownMajorVersion, 0));
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
    return method();  // one that is older than versions
  }
}

// The tensor of a capsule becomes the memory's owner; the capsule is marked as used, and lets go of
// it. Whoever drops the owner may not hold the GIL, or be the last thing that runs.
template <class Managed>
cuda::GpuMemory take_capsule(const pybind11::object& capsule, const char* name,
                             const char* used_name, int ordinal) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (managed == nullptr) {
    throw pybind11::error_already_set();
  }
  cuda::GpuMemory memory = cuda::dlpack::memory_of(*managed, ordinal);
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) {
    throw pybind11::error_already_set();
  }
  memory.owner = std::shared_ptr<Managed>(managed, [](Managed* dropped) {
    if (dropped->deleter != nullptr && Py_IsInitialized() != 0) {
      const pybind11::gil_scoped_acquire gil;
      dropped->deleter(dropped);
    }
  });
  return memory;
}

}  // namespace internal

// Throws InvalidArgumentError for what is no memory of that GPU, or cannot be written from begin to
// end; the object keeps it then. What the object's own methods raise is passed on.
inline cuda::GpuMemory dlpack_argument(const pybind11::object& exporter, int ordinal) {
  namespace py = pybind11;
  if (!py::hasattr(exporter, "__dlpack__") || !py::hasattr(exporter, "__dlpack_device__")) {
    throw InvalidArgumentError("memory is " + std::string(py::repr(py::type::of(exporter))) +
                               ", which has no __dlpack__: give a tensor of the GPU");
  }
  const auto [type, device] =
      exporter.attr("__dlpack_device__")().cast<std::pair<std::int32_t, std::int32_t>>();
  cuda::dlpack::check_device({type, device}, ordinal);
  const py::object capsule = internal::dlpack_capsule_of(exporter);
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    return internal::take_capsule<cuda::dlpack::VersionedTensor>(
        capsule, "dltensor_versioned", "used_dltensor_versioned", ordinal);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    return internal::take_capsule<cuda::dlpack::ManagedTensor>(capsule, "dltensor", "used_dltensor",
                                                               ordinal);
  }
  throw InvalidArgumentError("__dlpack__ of the memory gave " + std::string(py::repr(capsule)) +
                             ", which is no tensor, or one that was taken before");
}

}  // namespace pagedlora::bindings
