// C++ errors as Python exceptions: the classes of pagedlora.errors with the same names and fields.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace pagedlora::bindings {

// A new Python exception for any C++ one. The caller holds the GIL.
pybind11::object to_python_exception(const std::exception_ptr& error);

}  // namespace pagedlora::bindings
