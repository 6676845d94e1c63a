#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "argument.h"
#include "bindings.h"
#include "error_translation.h"
#include "pagedlora/batch_lease.h"
#include "pagedlora/errors.h"
#include "pagedlora/task_entries.h"
#include "stream_argument.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

std::optional<std::uint64_t> pointer(std::uint64_t address) {
  return address == 0 ? std::nullopt : std::optional(address);
}

void register_entries(py::module_& module) {
  using Entry = TaskLayerModuleConfig;
  py::class_<Entry>(module, "TaskLayerModuleConfig",
                    "One A part and one B part of a block; entries of a module add up.")
      .def_readonly("page_id", &Entry::page_id)
      .def_readonly("slot_idx", &Entry::slot_idx)
      .def_readonly("out_page_id", &Entry::out_page_id)
      .def_readonly("out_slot_idx", &Entry::out_slot_idx)
      .def_readonly("in_offset", &Entry::in_offset)
      .def_readonly("in_size", &Entry::in_size)
      .def_readonly("out_offset", &Entry::out_offset)
      .def_readonly("out_size", &Entry::out_size)
      .def_readonly("module_id", &Entry::module_id)
      .def_readonly("layer_id", &Entry::layer_id)
      .def_readonly("adapter_size", &Entry::adapter_size)
      .def_readonly("num_slots", &Entry::num_slots)
      .def_readonly("scale", &Entry::scale)
      .def_readonly("weights_in_pointer", &Entry::weights_in_pointer)
      .def_readonly("weights_out_pointer", &Entry::weights_out_pointer)
      .def_property_readonly(
          "scaling_vec_pointer",
          [](const Entry& entry) { return pointer(entry.scaling_vec_pointer); },
          "Of float32 [out_size]; None without DoRA.")
      .def_property_readonly(
          "bias_pointer", [](const Entry& entry) { return pointer(entry.bias_pointer); },
          "Of float32 [out_size]; None without a bias.")
      .def_readonly("module_name", &Entry::module_name);
}

const BatchLease::LeasedTask& leased_task(const BatchLease& self, RequestId request) {
  const BatchLease::LeasedTask* leased = self.find(request);
  if (leased == nullptr) {
    throw RequestNotLeasedError(request);
  }
  return *leased;
}

std::vector<std::uint64_t> request_ids(const BatchLease& self) {
  std::vector<std::uint64_t> ids;
  ids.reserve(self.requests().size());
  for (const BatchLease::LeasedRequest& leased : self.requests()) {
    ids.push_back(leased.request.value);
  }
  return ids;
}

using Entries = std::vector<TaskLayerModuleConfig>;

Entries entries_of(const BatchLease& self, RequestId request) {
  return task_entries(leased_task(self, request).pages, self.config());
}

std::vector<Entries> all_entries(const BatchLease& self) {
  std::vector<Entries> values;
  for (const std::uint64_t request : request_ids(self)) {
    values.push_back(entries_of(self, RequestId{request}));
  }
  return values;
}

std::vector<std::pair<std::uint64_t, Entries>> items_of(const BatchLease& self) {
  std::vector<std::pair<std::uint64_t, Entries>> items;
  for (const std::uint64_t request : request_ids(self)) {
    items.emplace_back(request, entries_of(self, RequestId{request}));
  }
  return items;
}

py::object get_entries(const BatchLease& self, RequestArgument request, py::object fallback) {
  return self.has_request(to_id(request)) ? py::cast(entries_of(self, to_id(request)))
                                          : std::move(fallback);
}

// What is no id is not in there, as in any mapping.
bool contains(const BatchLease& self, const py::object& request) {
  py::detail::make_caster<std::uint64_t> id;
  return id.load(request, true) &&
         self.has_request(RequestId{py::detail::cast_op<std::uint64_t>(id)});
}

std::set<std::uint32_t> touched_modules(const BatchLease& self) {
  self.check_open();
  std::set<std::uint32_t> modules;
  for (const BatchLease::LeasedTask& leased : self.tasks()) {
    for (const RowShape& row : leased.pages.layout->rows()) {
      modules.insert(row.module.value);
    }
  }
  return modules;
}

py::dict lease_errors(const BatchLease& self) {
  py::dict errors;
  for (const auto& [request, error] : self.errors()) {
    errors[py::int_(request.value)] = to_python_exception(error);
  }
  return errors;
}

void register_lease(py::module_& module) {
  py::class_<BatchLease, std::shared_ptr<BatchLease>> type(
      module, "BatchLease",
      "A batch's hold on the device copies that it reads: a mapping of request ids to entries.\n\n"
      "Entries are made when asked for. Close it after the last read; it is a context manager.\n"
      "Whatever reads pages raises LeaseClosedError afterwards. Thread-safe.",
      py::release_gil_before_calling_cpp_dtor());
  type.def("__getitem__", [](const BatchLease& self,
                             RequestArgument request) { return entries_of(self, to_id(request)); })
      .def("__len__", [](const BatchLease& self) { return self.requests().size(); })
      .def("__contains__", &contains)
      .def("__iter__", [](const BatchLease& self) { return py::iter(py::cast(request_ids(self))); })
      .def("keys", &request_ids)
      .def("values", &all_entries)
      .def("items", &items_of)
      .def("get", &get_entries, "request_id"_a, "default"_a = py::none())
      .def(
          "task_of",
          [](const BatchLease& self, RequestArgument request) {
            return leased_task(self, to_id(request)).task.value;
          },
          "request_id"_a)
      .def("touched_modules", &touched_modules,
           "Indices of the modules that any adapter of the batch touches.")
      .def_property_readonly("errors", &lease_errors,
                             "Requests whose adapter could not be brought in, with their errors.")
      .def_property_readonly("is_open", &BatchLease::is_open)
      .def(
          "close",
          [](BatchLease& self, const py::object& stream) {
            void* const last_reads = stream_argument(stream);
            const py::gil_scoped_release release;
            self.close(last_reads);
          },
          "stream"_a = py::none(),
          R"(Ends the hold once what is launched on the stream is done; idempotent.

The stream is one of torch or its number. Without one a GPU is waited for as a whole. Raises
InvalidArgumentError, and leaves the lease open, if the stream is being captured.)")
      .def("__enter__", [](std::shared_ptr<BatchLease> self) { return self; })
      .def("__exit__", [](BatchLease& self, const py::args&) {
        const py::gil_scoped_release release;
        self.close();
      });
  py::module_::import("collections.abc").attr("Mapping").attr("register")(type);
}

}  // namespace

void register_batch_lease(py::module_& module) {
  register_entries(module);
  register_lease(module);
}

}  // namespace pagedlora::bindings
