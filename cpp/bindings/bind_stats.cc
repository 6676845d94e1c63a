#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "pagedlora/stats.h"

namespace pagedlora::bindings {
namespace py = pybind11;
namespace {

std::string shown(const TierStats& stats) {
  return "TierStats(hits=" + std::to_string(stats.hits) +
         ", misses=" + std::to_string(stats.misses) +
         ", tasks_loaded=" + std::to_string(stats.tasks_loaded) +
         ", tasks_evicted=" + std::to_string(stats.tasks_evicted) +
         ", pages_evicted=" + std::to_string(stats.pages_evicted) +
         ", bytes_loaded=" + std::to_string(stats.bytes_loaded) +
         ", load_seconds=" + std::to_string(stats.load_seconds) + ")";
}

std::string shown(const PeftCacheStats& stats) {
  return "PeftCacheStats(host=" + shown(stats.host) + ", device=" + shown(stats.device) +
         ", source_reads=" + std::to_string(stats.source_reads) +
         ", source_rereads=" + std::to_string(stats.source_rereads) +
         ", source_bytes=" + std::to_string(stats.source_bytes) +
         ", failed_loads=" + std::to_string(stats.failed_loads) + ")";
}

}  // namespace

void register_stats(py::module_& module) {
  py::class_<TierStats>(module, "TierStats", "Counters of one tier since construction.")
      .def_readonly("hits", &TierStats::hits,
                    "There, or on its way, when a request was added (host) or a batch asked for it "
                    "(device).")
      .def_readonly("misses", &TierStats::misses, "It was not: a load had to be started.")
      .def_readonly("tasks_loaded", &TierStats::tasks_loaded,
                    "Adapters brought in, for a miss or ahead of one.")
      .def_readonly("tasks_evicted", &TierStats::tasks_evicted)
      .def_readonly("pages_evicted", &TierStats::pages_evicted)
      .def_readonly("bytes_loaded", &TierStats::bytes_loaded, "Of adapters brought in.")
      .def_readonly("load_seconds", &TierStats::load_seconds, "That workers took to bring them in.")
      .def("__repr__", [](const TierStats& stats) { return shown(stats); });
  py::class_<PeftCacheStats>(module, "PeftCacheStats", "Counters of a manager since construction.")
      .def_readonly("host", &PeftCacheStats::host)
      .def_readonly("device", &PeftCacheStats::device)
      .def_readonly("source_reads", &PeftCacheStats::source_reads,
                    "Whole adapters read from their files.")
      .def_readonly("source_rereads", &PeftCacheStats::source_rereads,
                    "Of them, those that had been read before.")
      .def_readonly("source_bytes", &PeftCacheStats::source_bytes, "Read from files.")
      .def_readonly("failed_loads", &PeftCacheStats::failed_loads)
      .def("__repr__", [](const PeftCacheStats& stats) { return shown(stats); });
}

}  // namespace pagedlora::bindings
