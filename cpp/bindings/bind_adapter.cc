#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pagedlora/adapter_plan.h"
#include "pagedlora/adapter_root.h"
#include "pagedlora/peft_cache_manager.h"
#include "pagedlora/safetensors_header.h"
#include "pagedlora/tensor_source.h"
#include "path_argument.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

PlannedRow make_row(std::uint32_t module, std::uint32_t rank, float scale, std::uint64_t a_offset,
                    Dtype a_dtype, std::uint64_t b_offset, Dtype b_dtype) {
  return {ModuleIndex{module}, rank, {a_offset, a_dtype}, {b_offset, b_dtype}, scale};
}

// A view of a Python buffer, which cannot be resized while the view lives. Let go of from C++ threads
// that may not hold the GIL.
class HeldBuffer {
 public:
  explicit HeldBuffer(const py::buffer& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();  // not contiguous
    }
  }
  ~HeldBuffer() {
    if (Py_IsInitialized() != 0) {  // a reader that was stuck may come back after the interpreter
      const py::gil_scoped_acquire gil;
      PyBuffer_Release(&view_);
    }
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

std::shared_ptr<const TensorSource> memory_source(const py::buffer& buffer,
                                                  std::string description) {
  auto held = std::make_shared<const HeldBuffer>(buffer);
  return make_memory_source(held->bytes(), held, std::move(description));
}

std::shared_ptr<AdapterRoot> adapter_root(const py::str& directory) {
  const std::string path = to_core_path(directory);
  const py::gil_scoped_release release;
  return std::make_shared<AdapterRoot>(path);
}

void check_path(const AdapterRoot& root, const py::str& path) {
  const std::string core_path = to_core_path(path);
  const py::gil_scoped_release release;
  root.check(core_path);
}

int open_file(const py::str& path, const std::shared_ptr<const AdapterRoot>& root) {
  const std::string core_path = to_core_path(path);
  const py::gil_scoped_release release;
  return open_adapter_file(core_path, root.get());
}

std::shared_ptr<const TensorSource> file_source(const py::str& path,
                                                std::shared_ptr<const AdapterRoot> root) {
  const std::string core_path = to_core_path(path);
  const py::gil_scoped_release release;
  return open_file_source(core_path, std::move(root));
}

}  // namespace

void register_adapter(py::module_& module) {
  py::class_<AdapterRoot, py::smart_holder>(
      module, "AdapterRoot", "A directory that adapters' files must lie in; see adapter_root.h.")
      .def(py::init(&adapter_root), "directory"_a)
      .def_property_readonly("path",
                             [](const AdapterRoot& self) { return to_python_path(self.path()); })
      .def("check", &check_path, "path"_a, "Raises what opening a file or directory would.");
  module.def("open_file", &open_file, "path"_a, "root"_a = py::none(),
             "A descriptor of the regular file, beneath the root if there is one; the caller "
             "closes it.");
  py::class_<TensorSource, py::smart_holder>(module, "TensorSource",
                                             "Where an adapter's bytes come from.")
      .def_property_readonly("size_bytes", &TensorSource::size_bytes)
      .def_property_readonly("description", [](const TensorSource& self) {
        return to_python_path(self.description());
      });
  py::class_<SourceGroup, TensorSource, py::smart_holder>(
      module, "SourceGroup", "Several sources of the same bytes, each tried in turn.")
      .def(py::init<std::shared_ptr<const TensorSource>>(), "first"_a.none(false))
      .def("add", &SourceGroup::add, "source"_a.none(false));
  module.def("open_file_source", &file_source, "path"_a, "root"_a = py::none(),
             "The regular file as it is now; later reads fail if it changed.");
  module.def("make_memory_source", &memory_source, "buffer"_a, "description"_a,
             "Bytes of a buffer that is kept alive.");

  py::class_<TensorHeader>(module, "TensorHeader", "One tensor of a safetensors file.")
      .def_readonly("name", &TensorHeader::name)
      .def_readonly("dtype", &TensorHeader::dtype)
      .def_readonly("shape", &TensorHeader::shape)
      .def_readonly("offset", &TensorHeader::offset)
      .def_readonly("num_bytes", &TensorHeader::num_bytes);
  module.def("read_safetensors_header", &read_safetensors_header, "source"_a,
             py::call_guard<py::gil_scoped_release>(),
             "The tensors of a safetensors source, by offset; refuses what the format forbids.");

  py::class_<PlannedRow>(module, "PlannedRow", "One module's A and B in a source.")
      .def(py::init(&make_row), "module"_a, "rank"_a, "scale"_a, "a_offset"_a, "a_dtype"_a,
           "b_offset"_a, "b_dtype"_a)
      .def_property_readonly("module", [](const PlannedRow& row) { return row.module.value; })
      .def_readonly("rank", &PlannedRow::rank)
      .def_readonly("scale", &PlannedRow::scale);

  py::class_<AdapterPlan, py::smart_holder>(module, "AdapterPlan",
                                            "What an adapter consists of and where it is read.")
      .def(py::init<const LoraModelConfig&, std::vector<PlannedRow>,
                    std::shared_ptr<const TensorSource>>(),
           "config"_a, "rows"_a, "source"_a.none(false))
      .def_property_readonly("rows", &AdapterPlan::rows);

  py::class_<CarriedWeights>(module, "CarriedWeights", "Weights that come with a request.")
      .def(py::init([](std::shared_ptr<const AdapterPlan> plan, std::string digest) {
             return CarriedWeights{std::move(plan), std::move(digest)};
           }),
           "plan"_a.none(false), "digest"_a)
      .def_property_readonly("plan", [](const CarriedWeights& self) { return self.plan; });
}

}  // namespace pagedlora::bindings
