#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#ifdef PAGEDLORA_HAVE_CUDA
#include "dlpack_argument.h"
#include "pagedlora/cuda/cuda_device.h"
#include "pagedlora/cuda/gpu_support.h"
#endif

#include "bindings.h"
#include "pagedlora/device.h"
#include "pagedlora/errors.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

#ifndef PAGEDLORA_HAVE_CUDA
constexpr const char* kNoGpuPart =
    "this build of pagedlora has no GPU part: build it where nvcc is on PATH";
#endif

std::shared_ptr<Device> make_cuda_device_of_build(int ordinal, const py::object& memory) {
#ifdef PAGEDLORA_HAVE_CUDA
  cuda::CudaDeviceOptions options{.ordinal = ordinal};
  if (!memory.is_none()) {
    options.memory = dlpack_argument(memory, ordinal);
  }
  const py::gil_scoped_release release;
  return cuda::make_cuda_device(std::move(options));
#else
  static_cast<void>(ordinal);
  static_cast<void>(memory);
  throw GpuUnavailableError(kNoGpuPart);
#endif
}

py::dict gpu_support_of_build() {
  py::dict info;
#ifdef PAGEDLORA_HAVE_CUDA
  const cuda::GpuSupport found = cuda::gpu_support();
  info["state"] = cuda::gpu_state_name(found.state);
  info["num_devices"] = found.num_devices;
  info["driver_version"] = found.driver_version;
  info["runtime_version"] = found.runtime_version;
  info["detail"] = found.detail;
#else
  info["state"] = "built without CUDA";
  info["num_devices"] = 0;
  info["driver_version"] = 0;
  info["runtime_version"] = 0;
  info["detail"] = kNoGpuPart;
#endif
  return info;
}

}  // namespace

void register_gpu(py::module_& module) {
  module.def("gpu_support", &gpu_support_of_build,
             R"(Whether a GPU can be used, asked anew each time.

Returns state ("available", "built without CUDA", "no driver", "driver too old", "no device" or
"broken"), num_devices, driver_version and runtime_version (CUDA's, 13000 for 13.0; 0: none),
and detail, a sentence on what to do.)");
  module.def("make_cuda_device", &make_cuda_device_of_build, "ordinal"_a = 0,
             "memory"_a = py::none(), "A GPU as a device; see pagedlora.make_cuda_device.");
}

}  // namespace pagedlora::bindings
