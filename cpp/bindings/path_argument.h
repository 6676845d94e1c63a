// Paths between Python and C++: as Python spells them, with surrogates for bytes that are no UTF-8.
//
// Caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace pagedlora::bindings {

// Throws UnicodeEncodeError for a text that no file name has; may contain zero bytes.
inline std::string to_core_path(const pybind11::str& path) {
  PyObject* const encoded = PyUnicode_EncodeFSDefault(path.ptr());
  if (encoded == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::bytes>(encoded);
}

// Also for messages that contain paths.
inline pybind11::str to_python_path(const std::string& path) {
  PyObject* const decoded =
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (decoded == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::str>(decoded);
}

}  // namespace pagedlora::bindings
