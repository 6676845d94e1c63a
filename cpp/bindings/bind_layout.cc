#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pagedlora/entry_state.h"
#include "pagedlora/page_size_search.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using PyRows = std::vector<std::pair<std::uint32_t, std::uint32_t>>;  // (module index, rank)

std::vector<RowShape> to_rows(const PyRows& rows) {
  std::vector<RowShape> shapes;
  shapes.reserve(rows.size());
  for (const auto& [module, rank] : rows) {
    shapes.push_back({ModuleIndex{module}, rank, {}, {}});
  }
  return shapes;
}

py::list entry_transitions() {
  py::list transitions;
  for (const EntryTransition& transition : kEntryTransitions) {
    transitions.append(py::make_tuple(entry_state_name(transition.from),
                                      entry_event_name(transition.event),
                                      entry_state_name(transition.to)));
  }
  return transitions;
}

}  // namespace

void register_layout(py::module_& module) {
  py::class_<LayoutParams>(module, "LayoutParams", "Page and part sizes in bytes.")
      .def(py::init(
               [](std::size_t page_bytes, std::size_t element_bytes, std::size_t max_part_bytes) {
                 return LayoutParams{page_bytes, element_bytes, max_part_bytes};
               }),
           "page_bytes"_a, "element_bytes"_a, "max_part_bytes"_a = 0)
      .def_readonly("page_bytes", &LayoutParams::page_bytes)
      .def_readonly("element_bytes", &LayoutParams::element_bytes)
      .def_readonly("max_part_bytes", &LayoutParams::max_part_bytes);

  module.def(
      "measure_layout",
      [](const LoraModelConfig& config, const PyRows& rows, const LayoutParams& params) {
        const Layout layout(config, to_rows(rows), params);
        return py::make_tuple(layout.num_pages(), layout.payload_bytes());
      },
      "config"_a, "rows"_a, "params"_a,
      "Pages and bytes of weights of an adapter with these (module index, rank) rows.");
  module.def("search_layout_params", &search_layout_params, "config"_a, "budget_bytes"_a,
             "The sizes that a cache of `budget_bytes` with page_size=\"auto\" uses.");
  module.def("entry_transitions", &entry_transitions,
             "The state table of a cache entry: (from, event, to).");
}

}  // namespace pagedlora::bindings
