#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#ifdef PAGEDLORA_HAVE_CUDA
#include "pagedlora/cuda/cuda_scatter.h"
#endif

#include "bindings.h"
#include "leased_batch.h"
#include "pagedlora/adapter_plan.h"
#include "pagedlora/errors.h"
#include "pagedlora/scatter_plan.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

// (request, plan)
using PyAdapters = std::vector<std::pair<std::uint64_t, std::shared_ptr<AdapterPlan>>>;

#ifdef PAGEDLORA_HAVE_CUDA

cuda::Staging staging_argument(const std::string& name) {
  if (name == "pinned") {
    return cuda::Staging::pinned;
  }
  if (name == "device") {
    return cuda::Staging::device;
  }
  throw InvalidArgumentError("staging is \"" + name + "\"; \"pinned\" and \"device\" are known");
}

void check_is_of(const Layout& layout, const AdapterPlan* plan, const LoraModelConfig& config) {
  if (plan == nullptr || plan->config_fingerprint() != config.fingerprint() ||
      Layout(config, plan->row_shapes(), layout.params()).rows() != layout.rows()) {
    throw InvalidArgumentError("the plan is not of the shape of the adapter in the lease");
  }
}

// The pages are those of a lease, which nobody else may read meanwhile. It is kept for repeat().
class GpuScatter {
 public:
  GpuScatter(std::size_t staging_bytes, const std::string& staging, int ordinal)
      : scatter_({staging_bytes, staging_argument(staging), ordinal}) {}

  std::vector<std::uint64_t> execute(std::shared_ptr<BatchLease> lease, const PyAdapters& adapters,
                                     std::uintptr_t stream) {
    const std::scoped_lock lock(mutex_);
    lease_ = std::move(lease);
    const auto held = lease_->hold_open();
    std::vector<ScatterPlan> plans;
    plans.reserve(adapters.size());
    std::vector<std::unique_ptr<SourceReader>> readers;
    std::vector<cuda::CudaScatter::Adapter> targets;
    for (const auto& [request, plan] : adapters) {
      const BatchLease::LeasedTask& leased = held_task(lease_.get(), RequestId{request});
      check_is_of(*leased.layout, plan.get(), lease_->config());
      plans.emplace_back(lease_->config(), *plan, *leased.layout);
      readers.push_back(plan->source()->open());
      targets.push_back({plans.back(), *readers.back(), leased.pages});
    }
    std::vector<std::uint64_t> read;
    const auto outcomes = scatter_.execute(targets, std::bit_cast<void*>(stream));
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      if (outcomes[i].error != nullptr) {
        std::rethrow_exception(outcomes[i].error);
      }
      readers[i]->finish();
      read.push_back(outcomes[i].source_bytes);
    }
    return read;
  }

  void repeat(std::uintptr_t stream) {
    const std::scoped_lock lock(mutex_);
    if (lease_ != nullptr) {
      const auto held = lease_->hold_open();
      scatter_.repeat(std::bit_cast<void*>(stream));
    }
  }

  std::size_t num_launches() const { return scatter_.num_launches(); }
  std::size_t device_bytes() const { return scatter_.device_bytes(); }

 private:
  std::mutex mutex_;
  cuda::CudaScatter scatter_;
  std::shared_ptr<BatchLease> lease_;
};

#else

// Cannot be made, so nothing else of it is ever called.
class GpuScatter {
 public:
  GpuScatter(std::size_t, const std::string&, int) {
    throw GpuUnavailableError("this build of pagedlora has no GPU part");
  }
  std::vector<std::uint64_t> execute(const std::shared_ptr<BatchLease>&, const PyAdapters&,
                                     std::uintptr_t) {
    return {};
  }
  void repeat(std::uintptr_t) {}
  std::size_t num_launches() const { return 0; }
  std::size_t device_bytes() const { return 0; }
};

#endif

}  // namespace

void register_gpu_scatter(py::module_& module) {
  py::class_<GpuScatter>(
      module, "GpuScatter",
      "Fills leased pages on a GPU by the scatter kernel; see cuda_scatter.h.\n\n"
      "For tests and measurements. Thread-safe.",
      py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::size_t, const std::string&, int>(), py::kw_only(), "staging_bytes"_a,
           "staging"_a = "device", "ordinal"_a = 0,
           "staging: \"pinned\" memory that kernels read, or \"device\", which it is uploaded to.")
      .def("execute", &GpuScatter::execute, "lease"_a.none(false), "adapters"_a, "stream"_a = 0,
           py::call_guard<py::gil_scoped_release>(),
           "Reads the adapters (request id, plan) into the pages of those requests, and waits.\n\n"
           "Returns the bytes read of each, or raises the first error of one.")
      .def("repeat", &GpuScatter::repeat, "stream"_a = 0, py::call_guard<py::gil_scoped_release>(),
           "Enqueues the last launch of the last execute() again, while its lease is open.")
      .def_property_readonly("num_launches", &GpuScatter::num_launches, "Of the last execute().")
      .def_property_readonly("device_bytes", &GpuScatter::device_bytes);
}

}  // namespace pagedlora::bindings
