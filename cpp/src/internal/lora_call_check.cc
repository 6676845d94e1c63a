#include "internal/lora_call_check.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

void check_memory(const LoraCall& call) {
  const Activations& activations = call.activations;
  if (activations.num_rows != call.batch.num_rows()) {
    throw InvalidArgumentError("activations have " + std::to_string(activations.num_rows) +
                               " rows, the batch has " + std::to_string(call.batch.num_rows()));
  }
  if (activations.dtype > Dtype::bfloat16) {
    throw InvalidArgumentError("activations have a dtype of number " +
                               std::to_string(static_cast<int>(activations.dtype)) +
                               "; float32, float16 and bfloat16 are known");
  }
  if (activations.num_rows > 0 && (call.input == nullptr || activations.y == nullptr)) {
    const char* input = call.kind == ModuleKind::linear ? "x" : "token_ids";
    throw InvalidArgumentError(
        std::string(call.input == nullptr ? input : "y") + " is null, and the batch has " +
        std::to_string(activations.num_rows) + " rows: give the address of its first element");
  }
}

void check_task(const TaskPages& task, const LoraCall& call) {
  if (task.dtype != call.weights_dtype) {
    throw InvalidArgumentError("pages of " + std::string(dtype_name(task.dtype)) +
                               " given to a LoraOperator for " +
                               std::string(dtype_name(call.weights_dtype)));
  }
  if (!task.is_cpu_readable) {
    throw InvalidArgumentError(
        "the adapters of this batch lie in a GPU's memory, which a LoraOperator cannot read; use "
        "a CudaLoraOperator, or a cache on the CPU");
  }
  if (call.module.value >= task.layout->num_modules()) {
    throw InvalidArgumentError("module index " + std::to_string(call.module.value) +
                               " given for a model with " +
                               std::to_string(task.layout->num_modules()) + " LoRA modules");
  }
}

void check_kind(const RowShape& row, const LoraCall& call) {
  if (row.kind != call.kind) {
    throw InvalidArgumentError("module index " + std::to_string(call.module.value) +
                               (call.kind == ModuleKind::linear
                                    ? " is an embedding: give its tokens to apply_embedding()"
                                    : " is linear: give its input to apply()"));
  }
}

void check_stride(const char* name, std::int64_t stride, std::uint32_t width, ModuleIndex module) {
  if (stride < std::int64_t{width}) {
    throw InvalidArgumentError("the row stride of " + std::string(name) + " is " +
                               std::to_string(stride) +
                               " elements, and adapters of the batch use " + std::to_string(width) +
                               " of each row of module index " + std::to_string(module.value) +
                               ": give a stride of as many or more");
  }
}

}  // namespace

void check_call(const LoraCall& call) {
  check_memory(call);
  std::uint32_t x_width = 0;
  std::uint32_t y_width = 0;
  for (const LoraBatch::Run& run : call.batch.runs()) {
    check_task(run.task, call);
    const auto [first_row, end_row] = run.task.layout->rows_of(call.module);
    for (std::uint32_t row = first_row; row < end_row; ++row) {
      const RowShape& shape = run.task.layout->rows()[row];
      check_kind(shape, call);
      x_width = std::max(x_width, shape.in.offset + shape.in.length);
      y_width = std::max(y_width, shape.out.offset + shape.out.length);
    }
  }
  if (call.batch.num_rows() > 1) {  // tensors of one row have whatever stride there
    if (call.kind == ModuleKind::linear) {
      check_stride("x", call.activations.x_row_stride, x_width, call.module);
    }
    check_stride("y", call.activations.y_row_stride, y_width, call.module);
  }
}

}  // namespace pagedlora::internal
