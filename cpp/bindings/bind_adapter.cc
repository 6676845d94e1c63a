#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
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
#include "pagedlora/scratch_file.h"
#include "pagedlora/tensor_source.h"
#include "path_argument.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using PyRange = std::pair<std::uint32_t, std::uint32_t>;  // (offset, length)
using PyVector = std::pair<std::uint64_t, Dtype>;         // (offset in the source, dtype)

PlannedRow make_row(std::uint32_t module, std::uint32_t rank, float scale, std::uint64_t a_offset,
                    Dtype a_dtype, std::uint64_t b_offset, Dtype b_dtype, PyRange in, PyRange out,
                    std::uint32_t a_row_stride, std::uint32_t b_row_stride,
                    std::optional<PyVector> bias, std::optional<std::uint64_t> dora_scale_offset) {
  PlannedRow row;
  row.module = ModuleIndex{module};
  row.rank = rank;
  row.a = {a_offset, a_dtype, a_row_stride};
  row.b = {b_offset, b_dtype, b_row_stride};
  row.scale = scale;
  row.in = {in.first, in.second};
  row.out = {out.first, out.second};
  if (bias) {
    row.bias = {bias->first, bias->second};
  }
  if (dora_scale_offset) {
    row.dora_scale = {*dora_scale_offset, Dtype::float32};
  }
  return row;
}

PyRange to_pair(const FeatureRange& range) { return {range.offset, range.length}; }

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

std::shared_ptr<const ScratchPiece> append(ScratchFile& self, const py::buffer& buffer) {
  const HeldBuffer held(buffer);
  const py::gil_scoped_release release;
  return self.append(held.bytes());
}

}  // namespace

void register_adapter(py::module_& module) {
  py::class_<AdapterRoot, py::smart_holder>(
      module, "AdapterRoot", "A directory that adapters' files must lie in; see adapter_root.h.")
      .def(py::init(&adapter_root), "directory"_a)
      .def_property_readonly(
          "was_replaced",
          py::cpp_function(&AdapterRoot::was_replaced, py::call_guard<py::gil_scoped_release>()),
          "Whether its path names another directory by now.")
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

  py::class_<ScratchPiece, py::smart_holder>(
      module, "ScratchPiece", "Some bytes of a ScratchFile; their space is given back with it.")
      .def_property_readonly("size_bytes", &ScratchPiece::size_bytes);
  py::class_<ScratchFile, py::smart_holder>(
      module, "ScratchFile", "A nameless temporary file, for what is read again with an adapter.")
      .def(py::init(&ScratchFile::create), "directory"_a)
      .def("append", &append, "data"_a, "Writes the bytes of a buffer behind all others.")
      .def_property_readonly("used_bytes", &ScratchFile::used_bytes);
  module.def("source_with_tail", &with_tail, "head"_a.none(false), "tail"_a.none(false),
             "A source of the bytes of `head`, with its checks, and then those of `tail`.");

  py::class_<TensorHeader>(module, "TensorHeader", "One tensor of a safetensors file.")
      .def_readonly("name", &TensorHeader::name)
      .def_readonly("dtype", &TensorHeader::dtype)
      .def_readonly("shape", &TensorHeader::shape)
      .def_readonly("offset", &TensorHeader::offset)
      .def_readonly("num_bytes", &TensorHeader::num_bytes);
  module.def("read_safetensors_header", &read_safetensors_header, "source"_a,
             py::call_guard<py::gil_scoped_release>(),
             "The tensors of a safetensors source, by offset; refuses what the format forbids.");

  py::class_<PlannedRow>(
      module, "PlannedRow",
      "A and B of a module, or of a slice of it, in a source.\n\n"
      "With delta = scale * (B A x + bias), y += delta, or y += (dora_scale - 1) * (y - base "
      "bias)\n"
      "+ dora_scale * delta. bias is (offset, dtype), dora_scale of float32.\n\n"
      "A is [rank, in length], B [out length, rank]; y[out slice] += scale * B (A x[in slice]).\n"
      "A slice is (first feature, number of features); 0 features: to the module's end. A row\n"
      "stride counts elements between the starts of stored rows; 0: they lie back to back.")
      .def(py::init(&make_row), "module"_a, "rank"_a, "scale"_a, "a_offset"_a, "a_dtype"_a,
           "b_offset"_a, "b_dtype"_a, py::kw_only(), "in_slice"_a = PyRange{0, 0},
           "out_slice"_a = PyRange{0, 0}, "a_row_stride"_a = 0, "b_row_stride"_a = 0,
           "bias"_a = py::none(), "dora_scale_offset"_a = py::none())
      .def_property_readonly("module", [](const PlannedRow& row) { return row.module.value; })
      .def_property_readonly("in_slice", [](const PlannedRow& row) { return to_pair(row.in); })
      .def_property_readonly("out_slice", [](const PlannedRow& row) { return to_pair(row.out); })
      .def_readonly("rank", &PlannedRow::rank)
      .def_readonly("scale", &PlannedRow::scale);

  py::class_<AdapterPlan, py::smart_holder>(module, "AdapterPlan",
                                            "What an adapter consists of and where it is read.")
      .def(py::init<const LoraModelConfig&, std::vector<PlannedRow>,
                    std::shared_ptr<const TensorSource>, bool>(),
           "config"_a, "rows"_a, "source"_a.none(false), "checks_values"_a = false)
      .def_property_readonly("rows", &AdapterPlan::rows);

  py::class_<CarriedWeights>(module, "CarriedWeights", "Weights that come with a request.")
      .def(py::init([](std::shared_ptr<const AdapterPlan> plan, std::string digest) {
             return CarriedWeights{std::move(plan), std::move(digest)};
           }),
           "plan"_a.none(false), "digest"_a)
      .def_property_readonly("plan", [](const CarriedWeights& self) { return self.plan; });
}

}  // namespace pagedlora::bindings
