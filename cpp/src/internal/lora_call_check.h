// What the caller of a LoRA operator may have got wrong, found before anything is read or written.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedlora/lora_operator.h"

namespace pagedlora::internal {

struct LoraCall {
  const LoraBatch& batch;
  ModuleIndex module;
  ModuleKind kind = ModuleKind::linear;  // that the caller takes the module for
  Dtype weights_dtype = Dtype::float32;
  const Activations& activations;
  const void* input = nullptr;  // x, or the tokens of an embedding
};

// Throws InvalidArgumentError as LoraOperator::apply says.
void check_call(const LoraCall& call);

// The parts of it that do not depend on where the adapters are. `input` is x, or the tokens of an
// embedding; they throw InvalidArgumentError.
void check_activations(const Activations& activations, const void* input, ModuleKind kind,
                       std::uint32_t batch_rows);
void check_module(ModuleIndex module, std::size_t num_modules);
void check_kind(ModuleIndex module, ModuleKind is, ModuleKind taken_for);
// Of x or y, whose rows have `width` elements that are used.
void check_stride(const char* name, std::int64_t stride, std::uint64_t width, ModuleIndex module);

}  // namespace pagedlora::internal
