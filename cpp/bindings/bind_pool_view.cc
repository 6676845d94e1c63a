#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings.h"
#include "dlpack.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

py::capsule device_pool_to_dlpack(const std::shared_ptr<PeftCacheManager>& manager,
                                  std::optional<int> cuda_ordinal) {
  const auto [address, bytes] = manager->pool_range(Tier::device);
  return to_dlpack(address, bytes, cuda_ordinal, manager);
}

}  // namespace

void register_pool_view(py::module_& module) {
  module.def("device_pool_to_dlpack", &device_pool_to_dlpack, "manager"_a.none(false),
             "cuda_ordinal"_a,
             "The device tier's pages as a DLPack capsule of uint8, which keeps the manager.\n\n"
             "cuda_ordinal says which GPU they are on; None: the CPU can read them.");
}

}  // namespace pagedlora::bindings
