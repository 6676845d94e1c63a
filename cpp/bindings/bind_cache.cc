#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "error_translation.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "pagedlora/task_entries.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using PyOwners = std::unordered_map<std::uint64_t, std::set<std::uint64_t>>;

Tier tier_argument(const std::string& name) {
  if (name == "host") {
    return Tier::host;
  }
  if (name == "device") {
    return Tier::device;
  }
  throw InvalidArgumentError("tier is \"" + name + "\"; \"host\" and \"device\" are known");
}

PyOwners to_python(const std::unordered_map<TaskId, std::set<RequestId>>& tasks) {
  PyOwners owners;
  for (const auto& [task, requests] : tasks) {
    for (const RequestId request : requests) {
      owners[task.value].insert(request.value);
    }
  }
  return owners;
}

std::shared_ptr<PeftCacheManager> make_manager(std::shared_ptr<const LoraModelConfig> config,
                                               std::size_t host_cache_bytes,
                                               std::size_t device_cache_bytes,
                                               std::size_t page_bytes, std::size_t max_part_bytes,
                                               const std::string& eviction_policy) {
  return std::make_shared<PeftCacheManager>(
      std::move(config),
      PeftCacheSizes{host_cache_bytes, device_cache_bytes, page_bytes, max_part_bytes},
      make_host_device(), eviction_policy_factory(eviction_policy));
}

std::shared_ptr<BatchLease> ensure_batch(PeftCacheManager& self,
                                         const std::vector<std::uint64_t>& requests,
                                         bool reset_device_cache) {
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  for (const std::uint64_t request : requests) {
    ids.push_back(RequestId{request});
  }
  return self.ensure_batch(ids, reset_device_cache);
}

// Where one row of a task goes: (module index, rank, address of A, address of B).
using GatherTarget = std::tuple<std::uint32_t, std::uint32_t, std::uintptr_t, std::uintptr_t>;

void gather_rows(PeftCacheManager& self, std::uint64_t task, const std::string& tier,
                 const std::vector<GatherTarget>& targets) {
  self.read_task(TaskId{task}, tier_argument(tier),
                 [&](const TaskPages& pages, const AdapterPlan& plan) {
                   // The caller's memory fits the rows that it asked about before: compare first.
                   std::vector<RowShape> expected;
                   for (const auto& [module, rank, a, b] : targets) {
                     expected.push_back({ModuleIndex{module}, rank});
                   }
                   if (expected != plan.row_shapes()) {
                     throw InvalidArgumentError("the task has other rows than were asked for");
                   }
                   for (std::uint32_t row = 0; row < targets.size(); ++row) {
                     gather_row(pages, self.config(), row,
                                std::bit_cast<std::byte*>(std::get<2>(targets[row])),
                                std::bit_cast<std::byte*>(std::get<3>(targets[row])));
                   }
                 });
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> task_rows(PeftCacheManager& self,
                                                               std::uint64_t task,
                                                               const std::string& tier) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> rows;
  self.read_task(TaskId{task}, tier_argument(tier), [&](const TaskPages&, const AdapterPlan& plan) {
    for (const PlannedRow& row : plan.rows()) {
      rows.emplace_back(row.module.value, row.rank);
    }
  });
  return rows;
}

void register_stats(py::module_& module) {
  py::class_<TierStats>(module, "TierStats", "Counters of one tier since construction.")
      .def_readonly("hits", &TierStats::hits)
      .def_readonly("misses", &TierStats::misses)
      .def_readonly("tasks_evicted", &TierStats::tasks_evicted)
      .def_readonly("pages_evicted", &TierStats::pages_evicted)
      .def_readonly("bytes_loaded", &TierStats::bytes_loaded)
      .def_readonly("load_seconds", &TierStats::load_seconds);
  py::class_<PeftCacheStats>(module, "PeftCacheStats", "Counters of a manager since construction.")
      .def_readonly("host", &PeftCacheStats::host)
      .def_readonly("device", &PeftCacheStats::device)
      .def_readonly("source_reads", &PeftCacheStats::source_reads)
      .def_readonly("source_rereads", &PeftCacheStats::source_rereads)
      .def_readonly("source_bytes", &PeftCacheStats::source_bytes)
      .def_readonly("failed_loads", &PeftCacheStats::failed_loads);
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
      .def_property_readonly("scaling_vec_pointer", [](const Entry&) { return py::none(); })
      .def_readonly("module_name", &Entry::module_name);
}

const BatchLease::LeasedTask& leased_task(const BatchLease& self, std::uint64_t request) {
  const BatchLease::LeasedTask* leased = self.find(RequestId{request});
  if (leased == nullptr) {
    throw py::key_error(std::to_string(request));
  }
  return *leased;
}

std::vector<std::uint64_t> request_ids(const BatchLease& self) {
  std::vector<std::uint64_t> ids;
  ids.reserve(self.requests().size());
  for (const auto& [request, position] : self.requests()) {
    ids.push_back(request.value);
  }
  return ids;
}

using Entries = std::vector<TaskLayerModuleConfig>;

Entries entries_of(const BatchLease& self, std::uint64_t request) {
  return task_entries(leased_task(self, request).pages, self.config());
}

std::vector<Entries> all_entries(const BatchLease& self) {
  std::vector<Entries> values;
  for (const std::uint64_t request : request_ids(self)) {
    values.push_back(entries_of(self, request));
  }
  return values;
}

std::vector<std::pair<std::uint64_t, Entries>> items_of(const BatchLease& self) {
  std::vector<std::pair<std::uint64_t, Entries>> items;
  for (const std::uint64_t request : request_ids(self)) {
    items.emplace_back(request, entries_of(self, request));
  }
  return items;
}

py::object get_entries(const BatchLease& self, std::uint64_t request, py::object fallback) {
  return self.requests().contains(RequestId{request}) ? py::cast(entries_of(self, request))
                                                      : std::move(fallback);
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
  type.def("__getitem__", &entries_of)
      .def("__len__", [](const BatchLease& self) { return self.requests().size(); })
      .def("__contains__",
           [](const BatchLease& self, std::uint64_t request) {
             return self.requests().contains(RequestId{request});
           })
      .def("__iter__", [](const BatchLease& self) { return py::iter(py::cast(request_ids(self))); })
      .def("keys", &request_ids)
      .def("values", &all_entries)
      .def("items", &items_of)
      .def("get", &get_entries, "request_id"_a, "default"_a = py::none())
      .def(
          "task_of",
          [](const BatchLease& self, std::uint64_t request) {
            return leased_task(self, request).task.value;
          },
          "request_id"_a)
      .def("touched_modules", &touched_modules,
           "Indices of the modules that any adapter of the batch touches.")
      .def_property_readonly("errors", &lease_errors,
                             "Requests whose adapter could not be brought in, with their errors.")
      .def_property_readonly("is_open", &BatchLease::is_open)
      .def(
          "close",
          [](BatchLease& self, const py::object& /*stream*/) {
            const py::gil_scoped_release release;
            self.close();
          },
          "stream"_a = py::none(), "Ends the hold; idempotent.")
      .def("__enter__", [](std::shared_ptr<BatchLease> self) { return self; })
      .def("__exit__", [](BatchLease& self, const py::args&) {
        const py::gil_scoped_release release;
        self.close();
      });
  py::module_::import("collections.abc").attr("Mapping").attr("register")(type);
}

void register_manager_calls(py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>>& type) {
  type.def(py::init(&make_manager), "config"_a.none(false), py::kw_only(), "host_cache_bytes"_a,
           "device_cache_bytes"_a, "page_bytes"_a = 0, "max_part_bytes"_a = 0,
           "eviction_policy"_a = "lru", ReleaseGil())
      .def(
          "register_task",
          [](PeftCacheManager& self, std::shared_ptr<const AdapterPlan> plan) {
            return self.register_task(std::move(plan)).value;
          },
          "plan"_a.none(false), ReleaseGil())
      .def(
          "add_request_peft",
          [](PeftCacheManager& self, std::uint64_t request, std::uint64_t task,
             const CarriedWeights* weights) {
            self.add_request_peft(RequestId{request}, TaskId{task}, weights);
          },
          "request_id"_a, "task_id"_a, "weights"_a = nullptr, ReleaseGil())
      .def(
          "mark_request_done",
          [](PeftCacheManager& self, std::uint64_t request, bool pause) {
            self.mark_request_done(RequestId{request}, pause);
          },
          "request_id"_a, "pause"_a = false, ReleaseGil())
      .def("ensure_batch", &ensure_batch, "request_ids"_a, "reset_device_cache"_a = false,
           py::keep_alive<0, 1>(), ReleaseGil())
      .def("reset_device_cache", &PeftCacheManager::reset_device_cache, ReleaseGil())
      .def(
          "evict_unowned",
          [](PeftCacheManager& self, const std::string& tier) {
            self.evict_unowned(tier_argument(tier));
          },
          "tier"_a, ReleaseGil())
      .def("gather_rows", &gather_rows, "task_id"_a, "tier"_a, "targets"_a, ReleaseGil())
      .def("close", &PeftCacheManager::close, ReleaseGil())
      .def("check_invariants", &PeftCacheManager::check_invariants, ReleaseGil());
}

void register_manager_queries(
    py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>>& type) {
  const auto by_tier = [](auto query) {
    return [query](const PeftCacheManager& self, const std::string& tier) {
      return (self.*query)(tier_argument(tier));
    };
  };
  type.def("task_rows", &task_rows, "task_id"_a, "tier"_a, ReleaseGil())
      .def(
          "is_task_cached",
          [](const PeftCacheManager& self, std::uint64_t task, const std::string& tier) {
            return self.is_task_cached(TaskId{task}, tier_argument(tier));
          },
          "task_id"_a, "tier"_a, ReleaseGil())
      .def(
          "is_task_done",
          [](const PeftCacheManager& self, std::uint64_t task) {
            return self.is_task_done(TaskId{task});
          },
          "task_id"_a, ReleaseGil())
      .def(
          "is_task_done_device",
          [](const PeftCacheManager& self, std::uint64_t task) {
            return self.is_task_done_device(TaskId{task});
          },
          "task_id"_a, ReleaseGil())
      .def(
          "is_owner",
          [](const PeftCacheManager& self, std::uint64_t request) {
            return self.task_of(RequestId{request}).has_value();
          },
          "request_id"_a, ReleaseGil())
      .def(
          "active_tasks",
          [](const PeftCacheManager& self) { return to_python(self.active_tasks()); }, ReleaseGil())
      .def(
          "paused_tasks",
          [](const PeftCacheManager& self) { return to_python(self.paused_tasks()); }, ReleaseGil())
      .def(
          "num_pages_of_task",
          [](PeftCacheManager& self, std::uint64_t task) {
            return self.num_pages_of(TaskId{task});
          },
          "task_id"_a, ReleaseGil())
      .def(
          "num_pages_of_plan",
          [](PeftCacheManager& self, const AdapterPlan& plan) { return self.num_pages_of(plan); },
          "plan"_a, ReleaseGil())
      .def("max_pages", by_tier(&PeftCacheManager::max_pages), "tier"_a, ReleaseGil())
      .def("free_pages", by_tier(&PeftCacheManager::free_pages), "tier"_a, ReleaseGil())
      .def("resident_tasks", by_tier(&PeftCacheManager::resident_tasks), "tier"_a, ReleaseGil())
      .def("pool_range", by_tier(&PeftCacheManager::pool_range), "tier"_a, ReleaseGil())
      .def_property_readonly("layout_params", &PeftCacheManager::layout_params)
      .def_property_readonly("stats", py::cpp_function(&PeftCacheManager::stats, ReleaseGil()));
}

}  // namespace

void register_cache(py::module_& module) {
  register_stats(module);
  register_entries(module);
  register_lease(module);
  py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>> type(
      module, "PeftCacheManager", "The two-tier cache; see pagedlora.PeftCacheManager.");
  register_manager_calls(type);
  register_manager_queries(type);
}

}  // namespace pagedlora::bindings
