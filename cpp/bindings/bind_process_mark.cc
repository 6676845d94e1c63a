#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings.h"
#include "pagedlora/process_mark.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;

void register_process_mark(py::module_& module) {
  py::class_<ProcessMark>(module, "ProcessMark",
                          "The process in which an object was made; see process_mark.h.")
      .def(py::init<>())
      .def_property_readonly("is_here", &ProcessMark::is_here,
                             "False in a child that was forked from that process.")
      .def(
          "check",
          [](const ProcessMark& self, const std::string& what) { self.check(what.c_str()); },
          "what"_a, "Raises InvalidArgumentError, which begins with `what`, in such a child.");
}

}  // namespace pagedlora::bindings
