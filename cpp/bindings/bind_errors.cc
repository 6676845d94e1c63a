#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "error_translation.h"
#include "pagedlora/errors.h"
#include "path_argument.h"

namespace pagedlora::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;

template <class... Fields>
py::object make(const char* name, const std::exception& error, Fields&&... fields) {
  const py::object type = py::module_::import("pagedlora.errors").attr(name);
  return type(to_python_path(error.what()), std::forward<Fields>(fields)...);
}

// Rethrows to find the dynamic type; each handler names the Python twin and its fields.
py::object translate(const std::exception_ptr& pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const LoraCacheFullError& error) {
    return make("LoraCacheFullError", error, "tier"_a = error.tier,
                "needed_pages"_a = error.needed_pages, "free_pages"_a = error.free_pages,
                "evictable_pages"_a = error.evictable_pages);
  } catch (const AdapterTooLargeError& error) {
    return make("AdapterTooLargeError", error, "tier"_a = error.tier,
                "needed_pages"_a = error.needed_pages, "total_pages"_a = error.total_pages,
                "page_bytes"_a = error.page_bytes);
  } catch (const PeftTaskNotCachedError& error) {
    return make("PeftTaskNotCachedError", error, "task_id"_a = error.task.value);
  } catch (const AdapterFormatError& error) {
    return make("AdapterFormatError", error, "path"_a = to_python_path(error.path),
                "tensor"_a = error.tensor);
  } catch (const AdapterSourceChangedError& error) {
    return make("AdapterSourceChangedError", error, "path"_a = to_python_path(error.path));
  } catch (const AdapterNotFoundError& error) {
    return make("AdapterNotFoundError", error, "name"_a = to_python_path(error.path));
  } catch (const AdapterPathError& error) {
    return make("AdapterPathError", error, "path"_a = to_python_path(error.path),
                "root"_a = to_python_path(error.root));
  } catch (const AdapterReadError& error) {
    return make("AdapterReadError", error, "path"_a = to_python_path(error.path),
                "errno"_a = error.error_number);
  } catch (const AdapterLoadTimeout& error) {
    return make("AdapterLoadTimeout", error, "limit_seconds"_a = error.limit_seconds,
                "stuck_readers"_a = error.stuck_readers);
  } catch (const AdapterInUseError& error) {
    return make("AdapterInUseError", error, "task_id"_a = error.task.value,
                "num_owners"_a = error.num_owners);
  } catch (const OutOfMemoryError& error) {
    return make("OutOfMemoryError", error, "tier"_a = error.tier, "bytes"_a = error.bytes);
  } catch (const GpuUnavailableError& error) {
    return make("GpuUnavailableError", error, "reason"_a = error.reason);
  } catch (const GpuCallError& error) {
    return make("GpuCallError", error, "call"_a = error.call, "error_name"_a = error.error_name);
  } catch (const RequestConflictError& error) {
    return make("RequestConflictError", error);
  } catch (const RequestNotLeasedError& error) {
    return make("RequestNotLeasedError", error, "request_id"_a = error.request.value);
  } catch (const LeaseClosedError& error) {
    return make("LeaseClosedError", error);
  } catch (const InvalidArgumentError& error) {
    return make("InvalidArgumentError", error);
  } catch (const Error& error) {
    return make("PagedLoraError", error);
  } catch (const std::exception& error) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what());
  }
}

void set_python_error(const std::exception_ptr& pointer) {
  const py::object exception = translate(pointer);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

}  // namespace

py::object to_python_exception(const std::exception_ptr& error) { return translate(error); }

void register_errors(py::module_& /*module*/) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const Error&) {
      set_python_error(pointer);
    }
  });
}

}  // namespace pagedlora::bindings
