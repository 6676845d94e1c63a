#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "isa_argument.h"
#include "pagedlora/errors.h"

namespace pagedlora::bindings {
namespace py = pybind11;

Isa isa_argument(std::string_view name) {
  if (name == "auto") {
    return default_isa();
  }
  std::string known = "\"auto\"";
  for (const Isa isa : kIsas) {
    if (name == isa_name(isa)) {
      if (isa > best_isa()) {
        throw InvalidArgumentError("this processor or build has no " + std::string(name));
      }
      return isa;
    }
    known.append(isa == Isa::avx512 ? " and \"" : ", \"").append(isa_name(isa)).append("\"");
  }
  throw InvalidArgumentError("isa is \"" + std::string(name) + "\"; " + known + " are known");
}

void register_build_info(py::module_& module) {
  module.attr("__version__") = PAGEDLORA_VERSION;
  module.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = PAGEDLORA_VERSION;
        info["compiler"] = __VERSION__;
        info["best_isa"] = isa_name(best_isa());
        info["default_isa"] = isa_name(default_isa());
        return info;
      },
      "What this extension was built with, and which instruction set it uses here.");
}

}  // namespace pagedlora::bindings
