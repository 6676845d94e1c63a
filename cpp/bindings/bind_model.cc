#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "argument.h"
#include "bindings.h"
#include "pagedlora/lora_module.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;

void register_model(py::module_& module) {
  py::native_enum<Dtype>(module, "Dtype", "enum.Enum")
      .value("float32", Dtype::float32)
      .value("float16", Dtype::float16)
      .value("bfloat16", Dtype::bfloat16)
      .finalize();

  py::native_enum<ModuleKind>(module, "ModuleKind", "enum.Enum")
      .value("linear", ModuleKind::linear)
      .value("embedding", ModuleKind::embedding)
      .finalize();

  py::class_<LoraModule>(module, "LoraModule", "One layer of the model that can carry LoRA.")
      .def(py::init([](TextArgument<"name", "a string"> name,
                       Argument<std::int64_t, "in_features"> in_features,
                       Argument<std::int64_t, "out_features"> out_features,
                       Argument<std::int32_t, "layer_id"> layer_id,
                       Argument<std::int32_t, "module_id"> module_id,
                       Argument<ModuleKind, "kind", "a ModuleKind"> kind) {
             return LoraModule{std::move(name.value), layer_id.value,     module_id.value,
                               in_features.value,     out_features.value, kind.value};
           }),
           "name"_a, "in_features"_a, "out_features"_a, "layer_id"_a = -1, "module_id"_a = -1,
           "kind"_a = ModuleKind::linear)
      .def_readonly("name", &LoraModule::name)
      .def_readonly("layer_id", &LoraModule::layer_id)
      .def_readonly("module_id", &LoraModule::module_id)
      .def_readonly("in_features", &LoraModule::in_features)
      .def_readonly("out_features", &LoraModule::out_features)
      .def_readonly("kind", &LoraModule::kind)
      .def("__eq__", [](const LoraModule& a, const LoraModule& b) { return a == b; })
      .def("__repr__", [](const LoraModule& self) {
        return "LoraModule(" + self.name + ", " + std::to_string(self.in_features) + " -> " +
               std::to_string(self.out_features) +
               (self.kind == ModuleKind::embedding ? ", embedding)" : ")");
      });

  py::class_<LoraModelConfig, py::smart_holder>(module, "LoraModelConfig",
                                                "What a model offers to LoRA.")
      .def(py::init([](Argument<std::vector<LoraModule>, "modules", "a list of LoraModule"> modules,
                       Argument<Dtype, "dtype", "a pagedlora.Dtype"> dtype,
                       Argument<std::int32_t, "max_lora_rank"> max_lora_rank) {
             return std::make_unique<LoraModelConfig>(std::move(modules.value), dtype.value,
                                                      max_lora_rank.value);
           }),
           "modules"_a, "dtype"_a, "max_lora_rank"_a = 64)
      .def_property_readonly("modules", &LoraModelConfig::modules)
      .def_property_readonly("dtype", &LoraModelConfig::dtype)
      .def_property_readonly("max_lora_rank", &LoraModelConfig::max_lora_rank)
      .def(
          "find",
          [](const LoraModelConfig& self,
             const TextArgument<"name", "a string">& name) -> std::optional<std::uint32_t> {
            const std::optional<ModuleIndex> index = self.find(name.value);
            return index ? std::optional(index->value) : std::nullopt;
          },
          "name"_a, "Position of the module in `modules`, or None.");
}

}  // namespace pagedlora::bindings
