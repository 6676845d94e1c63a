#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "argument.h"
#include "bindings.h"
#include "isa_argument.h"
#include "leased_batch.h"
#include "pagedlora/errors.h"
#include "pagedlora/lora_operator.h"
#include "pagedlora/process_mark.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using PySegments = std::vector<std::pair<std::optional<std::uint64_t>, std::uint32_t>>;
using SegmentsArgument =
    Argument<PySegments, "segments", "a list of (request id or None, number of rows)">;
using LeaseArgument = Argument<std::optional<std::shared_ptr<BatchLease>>, "lease",
                               "a BatchLease, or None where no row has an adapter">;
using BatchArgument = Argument<const LeasedBatch*, "batch", "a LoraBatch">;
using DtypeArgument = Argument<Dtype, "dtype", "a pagedlora.Dtype">;
using ModuleArgument = Argument<std::uint32_t, "module_index">;
using YArgument = Argument<std::uintptr_t, "y_ptr">;
using RowsArgument = Argument<std::uint32_t, "num_rows">;
using YStrideArgument = Argument<std::int64_t, "y_row_stride">;

std::vector<LoraBatch::Segment> resolve(const BatchLease* lease, const PySegments& segments) {
  std::vector<LoraBatch::Segment> resolved;
  resolved.reserve(segments.size());
  for (const auto& [request, num_rows] : segments) {
    LoraBatch::Segment segment{std::nullopt, num_rows};
    if (request) {
      const BatchLease::LeasedTask* task =
          lease == nullptr ? nullptr : lease->find(RequestId{*request});
      if (task == nullptr) {
        throw RequestNotLeasedError(RequestId{*request});
      }
      segment.task = task->pages;
    }
    resolved.push_back(segment);
  }
  return resolved;
}

// A LoraOperator is thread-compatible; Python code may share one among threads.
struct SharedLoraOperator {
  SharedLoraOperator(Dtype dtype, Isa isa) : lora(dtype, isa) {}

  const ProcessMark process;
  LoraOperator lora;
  std::mutex mutex;
};

void apply(SharedLoraOperator& self, BatchArgument leased, ModuleArgument module,
           Argument<std::uintptr_t, "x_ptr"> x, YArgument y, RowsArgument num_rows,
           Argument<std::int64_t, "x_row_stride"> x_row_stride, YStrideArgument y_row_stride,
           DtypeArgument dtype, Argument<std::uintptr_t, "base_bias_ptr"> base_bias) {
  self.process.check("this LoRA operator");
  const auto held = leased.value->hold_open();
  const std::scoped_lock lock(self.mutex);
  self.lora.apply(leased.value->batch, ModuleIndex{module.value},
                  {std::bit_cast<const void*>(x.value), std::bit_cast<void*>(y.value),
                   x_row_stride.value, y_row_stride.value, num_rows.value, dtype.value,
                   std::bit_cast<const void*>(base_bias.value)});
}

void apply_embedding(SharedLoraOperator& self, BatchArgument leased, ModuleArgument module,
                     Argument<std::uintptr_t, "token_ids_ptr"> token_ids, YArgument y,
                     RowsArgument num_rows, YStrideArgument y_row_stride, DtypeArgument dtype,
                     Argument<float, "factor"> factor) {
  self.process.check("this LoRA operator");
  const auto held = leased.value->hold_open();
  const std::scoped_lock lock(self.mutex);
  self.lora.apply_embedding(
      leased.value->batch, ModuleIndex{module.value},
      {std::bit_cast<const std::int64_t*>(token_ids.value), std::bit_cast<void*>(y.value),
       y_row_stride.value, num_rows.value, dtype.value, factor.value});
}

}  // namespace

void register_lora_operator(py::module_& module) {
  py::class_<LeasedBatch>(module, "LoraBatch", "Which rows of a batch use which leased adapter.",
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](LeaseArgument given, const SegmentsArgument& segments) {
             std::shared_ptr<BatchLease> lease = std::move(given.value).value_or(nullptr);
             return LeasedBatch{LoraBatch(resolve(lease.get(), segments.value)), std::move(lease)};
           }),
           "lease"_a, "segments"_a, "Segments (request id or None, number of rows) in row order.")
      .def_property_readonly("num_rows",
                             [](const LeasedBatch& self) { return self.batch.num_rows(); })
      .def_property_readonly("num_runs",
                             [](const LeasedBatch& self) { return self.batch.runs().size(); })
      .def_property_readonly("has_dora_scales",
                             [](const LeasedBatch& self) { return self.batch.has_dora_scales(); })
      .def_property_readonly(
          "touched_modules",
          [](const LeasedBatch& self) {
            const auto touched = self.batch.touched_modules();
            return py::bytes(std::bit_cast<const char*>(touched.data()), touched.size());
          },
          "By module index, 1 where an adapter of the batch has weights; empty without adapters.");

  py::class_<SharedLoraOperator>(module, "LoraOperator",
                                 "y += scale * B (A x), from cache pages. Thread-safe.")
      .def(py::init([](DtypeArgument dtype, const TextArgument<"isa", "a string">& isa) {
             return std::make_unique<SharedLoraOperator>(dtype.value, isa_argument(isa.value));
           }),
           "dtype"_a, "isa"_a = "auto")
      .def(
          "apply", &apply, "batch"_a, "module_index"_a, "x_ptr"_a, "y_ptr"_a, "num_rows"_a,
          "x_row_stride"_a, "y_row_stride"_a, "dtype"_a, "base_bias_ptr"_a = 0,
          py::call_guard<py::gil_scoped_release>(),
          "Adds the adapters' outputs for one module to y [num_rows, out_features], in place.\n\n"
          "x is [num_rows, in_features]; strides count elements between rows, and the elements of\n"
          "a row lie back to back; dtype is that of x, y and base_bias [out_features], the "
          "module's\n"
          "own bias, which adapters with DoRA do not scale (0: it has none). Rows of the base\n"
          "model, and of adapters that do not touch the module, are left alone. Raises\n"
          "LeaseClosedError after the batch's lease was closed, InvalidArgumentError if num_rows "
          "is\n"
          "not the batch's, a pointer is 0, or a row's stride is less than what adapters use of "
          "it.")
      .def("apply_embedding", &apply_embedding, "batch"_a, "module_index"_a, "token_ids_ptr"_a,
           "y_ptr"_a, "num_rows"_a, "y_row_stride"_a, "dtype"_a, "factor"_a = 1.0F,
           py::call_guard<py::gil_scoped_release>(),
           "The same for an embedding, of int64 token_ids [num_rows].\n\n"
           "factor is what the module multiplies its output by after looking it up.");
}

}  // namespace pagedlora::bindings
