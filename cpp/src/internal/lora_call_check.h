// What a LoraOperator's caller may have got wrong, found before anything is read or written.
//
// Pure function; thread-safe.
#pragma once

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

}  // namespace pagedlora::internal
