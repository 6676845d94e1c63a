#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "argument.h"
#include "bindings.h"
#include "error_translation.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "pagedlora/process_mark.h"
#include "pagedlora/task_entries.h"
#include "stream_argument.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using PyOwners = std::unordered_map<std::uint64_t, std::set<std::uint64_t>>;

template <Literal kName>
using FlagArgument = Argument<bool, kName, "True or False">;
using TierArgument = TextArgument<"tier", "'host' or 'device'">;

Tier tier_of(const std::string& name) {
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

// Infinity and the like become three decades, which no clock's sum overflows with.
Clock::Time to_time(double seconds) {
  constexpr double kLongest = 1e9;
  if (std::isnan(seconds) || seconds < 0) {
    throw InvalidArgumentError("a time of " + std::to_string(seconds) +
                               " s is none: give 0 or more seconds");
  }
  return std::chrono::duration_cast<Clock::Time>(
      std::chrono::duration<double>(std::min(seconds, kLongest)));
}

// In a child of fork() all of it is leaked: another thread may have been changing it at that moment.
void destroy(PeftCacheManager* manager, const ProcessMark& process) {
  if (process.is_here()) {
    delete manager;
  }
}

std::shared_ptr<PeftCacheManager> make_manager(
    std::shared_ptr<const LoraModelConfig> config, std::size_t host_cache_bytes,
    std::size_t device_cache_bytes, std::size_t page_bytes, std::size_t max_part_bytes,
    const std::string& eviction_policy, std::size_t num_put_workers, std::size_t num_ensure_workers,
    std::size_t max_inflight_batches, double load_timeout_s,
    std::optional<std::shared_ptr<Clock>> clock, std::optional<std::shared_ptr<Device>> device) {
  auto manager = std::make_unique<PeftCacheManager>(
      std::move(config),
      PeftCacheOptions{.host_cache_bytes = host_cache_bytes,
                       .device_cache_bytes = device_cache_bytes,
                       .page_bytes = page_bytes,
                       .max_part_bytes = max_part_bytes,
                       .num_put_workers = num_put_workers,
                       .num_ensure_workers = num_ensure_workers,
                       .max_inflight_batches = max_inflight_batches,
                       .load_timeout = to_time(load_timeout_s),
                       .clock = clock.value_or(nullptr),
                       .on_evict = {}},
      device ? *device : make_host_device(), eviction_policy_factory(eviction_policy));
  return {manager.release(),
          [process = ProcessMark()](PeftCacheManager* unheld) { destroy(unheld, process); }};
}

std::shared_ptr<BatchLease> ensure_batch(PeftCacheManager& self,
                                         const std::vector<RequestArgument>& requests,
                                         FlagArgument<"reset_gpu_cache"> reset_device_cache,
                                         const py::object& stream) {
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  for (const RequestArgument request : requests) {
    ids.push_back(to_id(request));
  }
  void* const last_reads = stream_argument(stream);
  const py::gil_scoped_release release;
  return self.ensure_batch(ids, reset_device_cache.value, last_reads);
}

const char* state_name(AdapterState state) {
  switch (state) {
    case AdapterState::waiting:
      return "waiting";
    case AdapterState::loading:
      return "loading";
    case AdapterState::ready:
      return "ready";
    case AdapterState::failed:
      return "failed";
  }
  return "";
}

// (task, tier, whether it was loaded)
using PyOutcomes = std::vector<std::tuple<std::uint64_t, std::string, bool>>;
using PyAgree = std::function<py::object(const PyOutcomes&)>;
using AgreeArgument = Argument<std::optional<PyAgree>, "agree", "a function, or None">;
using AgreedArgument =
    Argument<PyOutcomes, "what agree returned", "a list of (task id, tier, whether it was loaded)">;

// The callback runs without the manager's lock and with the GIL.
Agree to_agree(const std::optional<PyAgree>& agree) {
  if (!agree) {
    return {};
  }
  return [agree = *agree](const std::vector<LoadOutcome>& ended) {
    const py::gil_scoped_acquire gil;
    PyOutcomes outcomes;
    for (const LoadOutcome& outcome : ended) {
      outcomes.emplace_back(outcome.task.value, outcome.tier == Tier::host ? "host" : "device",
                            outcome.loaded);
    }
    std::vector<LoadOutcome> agreed;
    py::detail::make_caster<AgreedArgument> caster;
    const py::object answer = agree(outcomes);
    caster.load(answer, true);
    for (const auto& [task, tier, loaded] : py::detail::cast_op<AgreedArgument>(caster).value) {
      agreed.push_back({TaskId{task}, tier_of(tier), loaded});
    }
    return agreed;
  };
}

std::vector<std::uint64_t> poll(PeftCacheManager& self, double timeout_s,
                                const AgreeArgument& agree) {
  const Agree agreement = to_agree(agree.value);
  std::vector<std::uint64_t> ids;
  const py::gil_scoped_release release;
  for (const RequestId request : self.poll(to_time(timeout_s), agreement)) {
    ids.push_back(request.value);
  }
  return ids;
}

// The error that `query` gives, asked for without the GIL: it may have to wait for the lock.
template <class Query>
py::object optional_error(Query query) {
  std::exception_ptr error;
  {
    const py::gil_scoped_release release;
    error = query();
  }
  return error == nullptr ? py::none() : to_python_exception(error);
}

void prefetch(PeftCacheManager& self, const std::vector<TaskArgument>& tasks) {
  std::vector<TaskId> window;
  for (const TaskArgument task : tasks) {
    window.push_back(to_id(task));
  }
  self.prefetch(window);
}

std::map<std::string, std::uint64_t> iteration_stats(PeftCacheManager& self) {
  const IterationStats stats = self.get_and_reset_iteration_stats();
  return {{"requestsPaused", stats.requests_paused},
          {"requestsResumed", stats.requests_resumed},
          {"requestsTerminated", stats.requests_terminated},
          {"tasksReleasedDevice", stats.tasks_released_device},
          {"tasksReleasedHost", stats.tasks_released_host},
          {"tasksEvictedDevice", stats.tasks_evicted_device},
          {"pagesEvictedDevice", stats.pages_evicted_device},
          {"tasksEvictedHost", stats.tasks_evicted_host},
          {"pagesEvictedHost", stats.pages_evicted_host},
          {"devicePagesTotal", stats.device_pages_total},
          {"devicePagesAvailable", stats.device_pages_available},
          {"hostPagesTotal", stats.host_pages_total},
          {"hostPagesAvailable", stats.host_pages_available},
          {"deviceTasksInProgress", stats.device_tasks_in_progress},
          {"deviceTasksDone", stats.device_tasks_done},
          {"activeTasks", stats.active_tasks},
          {"pausedTasks", stats.paused_tasks}};
}

// Where one row of a task goes: what it was said to be, then the addresses of A, B, the bias and
// the DoRA scale; the last two are not used for a row without.
using GatherTarget =
    std::tuple<RowShape, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>;

void gather_rows(PeftCacheManager& self, TaskArgument task, const TierArgument& tier,
                 const std::vector<GatherTarget>& targets) {
  self.read_task(to_id(task), tier_of(tier.value),
                 [&](const TaskPages& pages, const AdapterPlan& plan) {
                   // The caller's memory fits the rows that it asked about before: compare first.
                   std::vector<RowShape> expected;
                   for (const auto& [shape, a, b, bias, dora_scale] : targets) {
                     expected.push_back(shape);
                   }
                   if (expected != plan.row_shapes()) {
                     throw InvalidArgumentError("the task has other rows than were asked for");
                   }
                   for (std::uint32_t row = 0; row < targets.size(); ++row) {
                     gather_row(pages, row, std::bit_cast<std::byte*>(std::get<1>(targets[row])),
                                std::bit_cast<std::byte*>(std::get<2>(targets[row])));
                     gather_vector(pages, pages.layout->bias_parts(row),
                                   std::bit_cast<float*>(std::get<3>(targets[row])));
                     gather_vector(pages, pages.layout->dora_scale_parts(row),
                                   std::bit_cast<float*>(std::get<4>(targets[row])));
                   }
                 });
}

std::vector<RowShape> task_rows(PeftCacheManager& self, TaskArgument task,
                                const TierArgument& tier) {
  std::vector<RowShape> rows;
  self.read_task(to_id(task), tier_of(tier.value),
                 [&](const TaskPages&, const AdapterPlan& plan) { rows = plan.row_shapes(); });
  return rows;
}

void register_row_shape(py::module_& module) {
  const auto to_pair = [](const FeatureRange& range) {
    return std::pair(range.offset, range.length);
  };
  py::class_<RowShape>(module, "RowShape",
                       "A row of a task: (first feature, number of features) of its slices.")
      .def_property_readonly("module", [](const RowShape& row) { return row.module.value; })
      .def_readonly("rank", &RowShape::rank)
      .def_readonly("has_bias", &RowShape::has_bias)
      .def_readonly("has_dora_scale", &RowShape::has_dora_scale)
      .def_property_readonly("in_slice", [=](const RowShape& row) { return to_pair(row.in); })
      .def_property_readonly("out_slice", [=](const RowShape& row) { return to_pair(row.out); });
}

void register_manager_calls(py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>>& type) {
  type.def(py::init(&make_manager), "config"_a.none(false), py::kw_only(), "host_cache_bytes"_a,
           "device_cache_bytes"_a, "page_bytes"_a = 0, "max_part_bytes"_a = 0,
           "eviction_policy"_a = "lru", "num_put_workers"_a = 4, "num_ensure_workers"_a = 2,
           "max_inflight_batches"_a = 1, "load_timeout_s"_a = 60.0, "clock"_a = py::none(),
           "device"_a = py::none(), ReleaseGil())
      .def(
          "register_task",
          [](PeftCacheManager& self, std::shared_ptr<const AdapterPlan> plan) {
            return self.register_task(std::move(plan)).value;
          },
          "plan"_a.none(false), ReleaseGil())
      .def(
          "add_request_peft",
          [](PeftCacheManager& self, RequestArgument request, TaskArgument task,
             const CarriedWeights* weights, bool started) {
            self.add_request_peft(to_id(request), to_id(task), weights, started);
          },
          "request_id"_a, "task_id"_a, "weights"_a = nullptr, "started"_a = false, ReleaseGil())
      .def(
          "mark_request_done",
          [](PeftCacheManager& self, RequestArgument request, FlagArgument<"pause"> pause) {
            self.mark_request_done(to_id(request), pause.value);
          },
          "request_id"_a, "pause"_a = false, ReleaseGil())
      .def("ensure_batch", &ensure_batch, "request_ids"_a, "reset_device_cache"_a = false,
           "stream"_a = py::none(), py::keep_alive<0, 1>())
      .def("poll", &poll, "timeout_s"_a = 0.0, "agree"_a = py::none())
      .def("prefetch", &prefetch, "task_ids"_a, ReleaseGil())
      .def(
          "wait_idle",
          [](PeftCacheManager& self, double timeout_s) {
            return self.wait_idle(to_time(timeout_s));
          },
          "timeout_s"_a, ReleaseGil())
      .def(
          "pin", [](PeftCacheManager& self, TaskArgument task) { self.pin(to_id(task)); },
          "task_id"_a, ReleaseGil())
      .def(
          "unpin", [](PeftCacheManager& self, TaskArgument task) { self.unpin(to_id(task)); },
          "task_id"_a, ReleaseGil())
      .def(
          "unregister_task",
          [](PeftCacheManager& self, TaskArgument task) { self.unregister_task(to_id(task)); },
          "task_id"_a, ReleaseGil())
      .def("reset_device_cache", &PeftCacheManager::reset_device_cache, ReleaseGil())
      .def(
          "evict_unowned",
          [](PeftCacheManager& self, const TierArgument& tier) {
            self.evict_unowned(tier_of(tier.value));
          },
          "tier"_a, ReleaseGil())
      .def("gather_rows", &gather_rows, "task_id"_a, "tier"_a, "targets"_a, ReleaseGil())
      .def("close", &PeftCacheManager::close, ReleaseGil())
      .def("check_invariants", &PeftCacheManager::check_invariants, ReleaseGil());
}

void register_manager_queries(
    py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>>& type) {
  const auto by_tier = [](auto query) {
    return [query](const PeftCacheManager& self, const TierArgument& tier) {
      return (self.*query)(tier_of(tier.value));
    };
  };
  type.def("task_rows", &task_rows, "task_id"_a, "tier"_a, ReleaseGil())
      .def(
          "is_task_cached",
          [](const PeftCacheManager& self, TaskArgument task, const TierArgument& tier) {
            return self.is_task_cached(to_id(task), tier_of(tier.value));
          },
          "task_id"_a, "tier"_a, ReleaseGil())
      .def(
          "is_task_done",
          [](const PeftCacheManager& self, TaskArgument task) {
            return self.is_task_done(to_id(task));
          },
          "task_id"_a, ReleaseGil())
      .def(
          "is_task_done_device",
          [](const PeftCacheManager& self, TaskArgument task) {
            return self.is_task_done_device(to_id(task));
          },
          "task_id"_a, ReleaseGil())
      .def(
          "adapter_state",
          [](const PeftCacheManager& self, RequestArgument request) {
            return state_name(self.adapter_state(to_id(request)));
          },
          "request_id"_a, ReleaseGil())
      .def(
          "adapter_error",
          [](const PeftCacheManager& self, RequestArgument request) {
            return optional_error([&] { return self.adapter_error(to_id(request)); });
          },
          "request_id"_a)
      .def(
          "load_error",
          [](const PeftCacheManager& self, TaskArgument task) {
            return optional_error([&] { return self.load_error(to_id(task)); });
          },
          "task_id"_a)
      .def(
          "open_lease_tasks",
          [](const PeftCacheManager& self) {
            std::set<std::uint64_t> tasks;
            for (const TaskId task : self.open_lease_tasks()) {
              tasks.insert(task.value);
            }
            return tasks;
          },
          ReleaseGil())
      .def("get_and_reset_iteration_stats", &iteration_stats, ReleaseGil())
      .def(
          "is_owner",
          [](const PeftCacheManager& self, RequestArgument request) {
            return self.task_of(to_id(request)).has_value();
          },
          "request_id"_a, ReleaseGil())
      .def(
          "has_started",
          [](const PeftCacheManager& self, RequestArgument request) {
            return self.has_started(to_id(request));
          },
          "request_id"_a, ReleaseGil())
      .def(
          "was_revoked",
          [](const PeftCacheManager& self, RequestArgument request) {
            return self.was_revoked(to_id(request));
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
          [](PeftCacheManager& self, TaskArgument task) { return self.num_pages_of(to_id(task)); },
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

void register_peft_cache_manager(py::module_& module) {
  register_row_shape(module);
  py::class_<PeftCacheManager, std::shared_ptr<PeftCacheManager>> type(
      module, "PeftCacheManager", "The two-tier cache; see pagedlora.PeftCacheManager.",
      py::release_gil_before_calling_cpp_dtor());
  register_manager_calls(type);
  register_manager_queries(type);
}

}  // namespace pagedlora::bindings
