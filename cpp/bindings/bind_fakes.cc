#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pagedlora/clock.h"
#include "pagedlora/fake/device.h"
#include "pagedlora/fake/source.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void register_clocks(py::module_& module) {
  py::class_<Clock, std::shared_ptr<Clock>>(module, "Clock");
  py::class_<ManualClock, Clock, std::shared_ptr<ManualClock>>(
      module, "ManualClock", "Stands still until it is told to go on.")
      .def(py::init<>())
      .def(
          "advance",
          [](ManualClock& self, double seconds) {
            self.advance(
                std::chrono::duration_cast<Clock::Time>(std::chrono::duration<double>(seconds)));
          },
          "seconds"_a);
}

void register_fake_device(py::module_& module) {
  py::class_<Device, std::shared_ptr<Device>>(module, "Device")
      .def_property_readonly("name", &Device::name)
      .def(
          "memory_info",
          [](const Device& self) {
            const MemoryInfo info = self.memory_info();
            return std::pair(info.free_bytes, info.total_bytes);
          },
          ReleaseGil(), "Free and total bytes.");
  py::class_<fake::Device, Device, std::shared_ptr<fake::Device>>(
      module, "FakeDevice",
      "Ordinary memory with copies that are late, out of order, never done or failing.")
      .def(py::init<bool>(), "is_host_memory"_a = false)
      .def("hold_copies", [](fake::Device& self) { self.copies.close(); })
      .def("release_copies", [](fake::Device& self) { self.copies.open(); })
      .def(
          "release_copy", [](fake::Device& self, std::size_t n) { self.copies.let_pass(n); },
          "number"_a)
      .def(
          "fail_copy_after", [](fake::Device& self, int n) { self.fail_copy_after = n; },
          "number"_a)
      .def("hold_reads", &fake::Device::hold_reads)
      .def("finish_reads", &fake::Device::finish_reads)
      .def_property_readonly("num_copies",
                             [](const fake::Device& self) {
                               return self.copies_from_host.load() + self.copies_to_host.load();
                             })
      .def_property_readonly("num_held",
                             [](const fake::Device& self) { return self.copies.num_waiting(); });
}

void register_fake_source(py::module_& module) {
  // Held by a type of its own: TensorSource is held in another way.
  py::class_<fake::Source, TensorSource, py::smart_holder>(
      module, "FakeSource", "Bytes in memory with reads that are late, never done or failing.")
      .def(py::init([](const py::bytes& content, std::string description) {
             const std::string_view view = content;
             std::vector<std::byte> bytes(view.size());
             std::memcpy(bytes.data(), view.data(), view.size());
             return std::make_shared<fake::Source>(std::move(bytes), std::move(description));
           }),
           "content"_a, "description"_a = "fake source")
      .def("hold_reads", [](const fake::Source& self) { self.gate.close(); })
      .def("release_reads", [](const fake::Source& self) { self.gate.open(); })
      .def(
          "fail_read_after", [](const fake::Source& self, int n) { self.fail_read_after = n; },
          "number"_a)
      .def("fail_open", [](const fake::Source& self) { self.fail_open = true; })
      .def("fail_finish", [](const fake::Source& self) { self.fail_finish = true; })
      .def(
          "wait_for_reads",
          [](const fake::Source& self, std::size_t n) { self.gate.wait_for_begun(n); }, "number"_a,
          ReleaseGil())
      .def_property_readonly("num_opens",
                             [](const fake::Source& self) { return self.opens.load(); })
      .def_property_readonly("num_held",
                             [](const fake::Source& self) { return self.gate.num_waiting(); });
}

}  // namespace

void register_fakes(py::module_& module) {
  register_clocks(module);
  register_fake_device(module);
  register_fake_source(module);
}

}  // namespace pagedlora::bindings
