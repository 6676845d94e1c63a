#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef PAGEDLORA_HAVE_CUDA
#include "pagedlora/cuda/lora_operator.h"
#endif

#include "bindings.h"
#include "leased_batch.h"
#include "pagedlora/errors.h"
#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using PySegments = std::vector<std::pair<std::optional<std::uint64_t>, std::uint32_t>>;

#ifdef PAGEDLORA_HAVE_CUDA

// A CudaLoraOperator is thread-compatible; Python code may share one among threads. Between
// set_batch() and the next it keeps the lease that its batch is from.
class GpuLoraOperator {
 public:
  GpuLoraOperator(std::shared_ptr<const LoraModelConfig> config, const LayoutParams& layout,
                  std::uint32_t max_rows, std::uint32_t max_tasks, int ordinal, bool for_graphs,
                  bool starts_early)
      : lora_(std::move(config), {max_rows, max_tasks, layout, ordinal, for_graphs, starts_early}) {
  }

  void set_batch(std::shared_ptr<BatchLease> lease, const PySegments& segments,
                 std::uintptr_t stream) {
    const std::scoped_lock lock(mutex_);
    lora_.clear_batch();
    lease_ = std::move(lease);
    const auto held = hold_open();
    std::vector<cuda::CudaLoraOperator::Segment> resolved;
    for (const auto& [request, num_rows] : segments) {
      const BatchLease::LeasedTask* task = nullptr;
      if (request) {
        task = &held_task(lease_.get(), RequestId{*request});
      }
      resolved.push_back({task, num_rows});
    }
    lora_.set_batch(resolved, std::bit_cast<void*>(stream));
  }

  void apply(std::uint32_t module, std::uintptr_t x, std::uintptr_t y, std::uint32_t num_rows,
             std::int64_t x_row_stride, std::int64_t y_row_stride, Dtype dtype,
             std::uintptr_t base_bias, std::uintptr_t stream) {
    const std::scoped_lock lock(mutex_);
    const auto held = hold_open();
    lora_.apply(ModuleIndex{module},
                {std::bit_cast<const void*>(x), std::bit_cast<void*>(y), x_row_stride, y_row_stride,
                 num_rows, dtype, std::bit_cast<const void*>(base_bias)},
                std::bit_cast<void*>(stream));
  }

  void apply_embedding(std::uint32_t module, std::uintptr_t token_ids, std::uintptr_t y,
                       std::uint32_t num_rows, std::int64_t y_row_stride, Dtype dtype, float factor,
                       std::uintptr_t stream) {
    const std::scoped_lock lock(mutex_);
    const auto held = hold_open();
    lora_.apply_embedding(ModuleIndex{module},
                          {std::bit_cast<const std::int64_t*>(token_ids), std::bit_cast<void*>(y),
                           y_row_stride, num_rows, dtype, factor},
                          std::bit_cast<void*>(stream));
  }

  void clear_batch() {
    const std::scoped_lock lock(mutex_);
    lora_.clear_batch();
    lease_.reset();
  }

  std::size_t device_bytes() const { return lora_.device_bytes(); }

 private:
  std::shared_lock<std::shared_mutex> hold_open() const {
    return lease_ == nullptr ? std::shared_lock<std::shared_mutex>() : lease_->hold_open();
  }

  std::mutex mutex_;
  cuda::CudaLoraOperator lora_;
  std::shared_ptr<BatchLease> lease_;
};

#else

// Cannot be made, so nothing else of it is ever called.
class GpuLoraOperator {
 public:
  GpuLoraOperator(const std::shared_ptr<const LoraModelConfig>&, const LayoutParams&, std::uint32_t,
                  std::uint32_t, int, bool, bool) {
    throw GpuUnavailableError("this build of pagedlora has no GPU part");
  }
  void set_batch(const std::shared_ptr<BatchLease>&, const PySegments&, std::uintptr_t) {}
  void apply(std::uint32_t, std::uintptr_t, std::uintptr_t, std::uint32_t, std::int64_t,
             std::int64_t, Dtype, std::uintptr_t, std::uintptr_t) {}
  void apply_embedding(std::uint32_t, std::uintptr_t, std::uintptr_t, std::uint32_t, std::int64_t,
                       Dtype, float, std::uintptr_t) {}
  void clear_batch() {}
  std::size_t device_bytes() const { return 0; }
};

#endif

}  // namespace

void register_gpu_lora(py::module_& module) {
  py::class_<GpuLoraOperator>(module, "GpuLoraOperator",
                              "y += scale * B (A x) on a GPU, from the pages of its cache. "
                              "Thread-safe.")
      .def(py::init<std::shared_ptr<const LoraModelConfig>, const LayoutParams&, std::uint32_t,
                    std::uint32_t, int, bool, bool>(),
           "config"_a, "layout"_a, py::kw_only(), "max_rows"_a, "max_tasks"_a, "ordinal"_a = 0,
           "for_graphs"_a = false, "starts_early"_a = false,
           "Tables for max_rows rows of a batch and max_tasks adapters. for_graphs: launches do "
           "not\n"
           "depend on the batch, so that a captured graph may be replayed after the next one.\n"
           "starts_early: kernels load their weights while the one before them still runs.")
      .def("set_batch", &GpuLoraOperator::set_batch, "lease"_a.none(true), "segments"_a,
           "stream"_a = 0, py::call_guard<py::gil_scoped_release>(),
           "Says which rows use which leased adapter: (request id or None, number of rows) in row\n"
           "order. stream is a CUDA stream's number, as torch's cuda_stream; 0: the default one.")
      .def("clear_batch", &GpuLoraOperator::clear_batch)
      .def("apply", &GpuLoraOperator::apply, "module_index"_a, "x_ptr"_a, "y_ptr"_a, "num_rows"_a,
           "x_row_stride"_a, "y_row_stride"_a, "dtype"_a, "base_bias_ptr"_a = 0, "stream"_a = 0,
           py::call_guard<py::gil_scoped_release>(),
           "Enqueues what LoraOperator.apply does; pointers are the GPU's.")
      .def("apply_embedding", &GpuLoraOperator::apply_embedding, "module_index"_a,
           "token_ids_ptr"_a, "y_ptr"_a, "num_rows"_a, "y_row_stride"_a, "dtype"_a,
           "factor"_a = 1.0F, "stream"_a = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues what LoraOperator.apply_embedding does; pointers are the GPU's.")
      .def_property_readonly("device_bytes", &GpuLoraOperator::device_bytes);
}

}  // namespace pagedlora::bindings
