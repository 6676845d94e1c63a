#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

#include "bindings.h"
#include "leased_batch.h"
#include "pagedlora/batch_lease.h"
#include "pagedlora/errors.h"
#include "pagedlora/layout.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using Tiles = std::vector<std::pair<std::uint32_t, std::uintptr_t>>;  // features, address
using Blocks = std::vector<std::pair<std::uint32_t, Tiles>>;          // ranks, tiles
using Range = std::pair<std::uint32_t, std::uint32_t>;                // first feature, features

// Where one row of a leased task lies.
struct RowPages {
  Range in;
  Range out;
  std::uint32_t rank = 0;
  float scale = 1.0F;
  Blocks a;
  Blocks b;
  Tiles bias;
  Tiles dora_scale;
};

Tiles tiles_of(const TaskPages& task, std::span<const Part> parts) {
  Tiles tiles;
  tiles.reserve(parts.size());
  for (const Part& part : parts) {
    tiles.emplace_back(part.length, std::bit_cast<std::uintptr_t>(task.address(part.at)));
  }
  return tiles;
}

RowPages pages_of_row(const TaskPages& task, std::uint32_t row) {
  const Layout& layout = *task.layout;
  const RowShape& shape = layout.rows()[row];
  RowPages pages{.in = {shape.in.offset, shape.in.length},
                 .out = {shape.out.offset, shape.out.length},
                 .rank = shape.rank,
                 .scale = task.scales[row],
                 .a = {},
                 .b = {},
                 .bias = tiles_of(task, layout.bias_parts(row)),
                 .dora_scale = tiles_of(task, layout.dora_scale_parts(row))};
  for (const Block& block : layout.blocks_of_row(row)) {
    pages.a.emplace_back(block.rank_count, tiles_of(task, layout.a_parts(block)));
    pages.b.emplace_back(block.rank_count, tiles_of(task, layout.b_parts(block)));
  }
  return pages;
}

// Keeps a lease open from __enter__ to __exit__, and tells what is where meanwhile.
class LeasePages {
 public:
  explicit LeasePages(std::shared_ptr<BatchLease> lease) : lease_(std::move(lease)) {}

  void enter() {
    if (held_.owns_lock()) {
      throw InvalidArgumentError("the lease is held already: leave the block first");
    }
    held_ = lease_->hold_open();
  }
  void exit() {
    if (held_.owns_lock()) {
      held_.unlock();
    }
  }

  std::vector<RowPages> rows(std::uint64_t request, std::uint32_t module) const {
    if (!held_.owns_lock()) {
      throw InvalidArgumentError("pages are only told within `with`: others may evict them");
    }
    const TaskPages& task = held_task(lease_.get(), RequestId{request}).pages;
    std::vector<RowPages> rows;
    const auto [first, last] = task.layout->rows_of(ModuleIndex{module});
    for (std::uint32_t row = first; row < last; ++row) {
      rows.push_back(pages_of_row(task, row));
    }
    return rows;
  }

 private:
  std::shared_ptr<BatchLease> lease_;
  std::shared_lock<std::shared_mutex> held_;
};

}  // namespace

void register_lease_pages(py::module_& module) {
  py::class_<RowPages>(module, "RowPages",
                       "Where a row of a leased adapter lies: addresses are the device tier's.\n\n"
                       "Slices are (first feature, features). A tile is (features, address).")
      .def_readonly("in_slice", &RowPages::in)
      .def_readonly("out_slice", &RowPages::out)
      .def_readonly("rank", &RowPages::rank)
      .def_readonly("scale", &RowPages::scale)
      .def_readonly("a", &RowPages::a,
                    "Blocks (ranks, tiles); a tile is [ranks, features], of an embedding\n"
                    "[features, ranks].")
      .def_readonly("b", &RowPages::b, "Blocks (ranks, tiles); a tile is [features, ranks].")
      .def_readonly("bias", &RowPages::bias, "Tiles of float32; none without a bias.")
      .def_readonly("dora_scale", &RowPages::dora_scale, "Likewise.");
  py::class_<LeasePages>(module, "LeasePages",
                         "Within `with`: a lease that cannot be closed, and where its rows lie.\n\n"
                         "Launch in the block what reads the pages; whoever closes the lease waits "
                         "for its end.\nOf one thread. Entering raises LeaseClosedError.",
                         py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::shared_ptr<BatchLease>>(), "lease"_a.none(false))
      .def("rows", &LeasePages::rows, "request_id"_a, "module_index"_a,
           "The rows of the request's adapter for a module; none if it does not touch it.")
      .def("__enter__",
           [](LeasePages& self) -> LeasePages& {
             const py::gil_scoped_release release;
             self.enter();
             return self;
           })
      .def("__exit__", [](LeasePages& self, const py::args&) { self.exit(); });
}

}  // namespace pagedlora::bindings
