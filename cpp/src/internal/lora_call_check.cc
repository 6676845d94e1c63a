#include "internal/lora_call_check.h"

#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

constexpr std::int64_t kNoStride = std::numeric_limits<std::int64_t>::max();  // not looked at

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

[[noreturn]] void refuse_task(const TaskPages& task, const LoraCall& call) {
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
  throw InvalidArgumentError("module index " + std::to_string(call.module.value) +
                             " given for a model with " +
                             std::to_string(task.layout->num_modules()) + " LoRA modules");
}

[[noreturn]] void refuse_kind(const LoraCall& call) {
  throw InvalidArgumentError("module index " + std::to_string(call.module.value) +
                             (call.kind == ModuleKind::linear
                                  ? " is an embedding: give its tokens to apply_embedding()"
                                  : " is linear: give its input to apply()"));
}

[[noreturn]] void refuse_stride(const char* name, std::int64_t stride, std::uint32_t width,
                                ModuleIndex module) {
  throw InvalidArgumentError("the row stride of " + std::string(name) + " is " +
                             std::to_string(stride) + " elements, and adapters of the batch use " +
                             std::to_string(width) + " of each row of module index " +
                             std::to_string(module.value) + ": give a stride of as many or more");
}

}  // namespace

void check_call(const LoraCall& call) {
  check_memory(call);
  const Activations& activations = call.activations;
  const bool has_strides = activations.num_rows > 1;  // one row has whatever stride torch gives it
  const std::int64_t x_stride =
      has_strides && call.kind == ModuleKind::linear ? activations.x_row_stride : kNoStride;
  const std::int64_t y_stride = has_strides ? activations.y_row_stride : kNoStride;
  const Layout* last = nullptr;  // neighbours are often of one shape
  for (const LoraBatch::Run& run : call.batch.runs()) {
    const Layout* const layout = run.task.layout;
    if (run.task.dtype != call.weights_dtype || !run.task.is_cpu_readable ||
        call.module.value >= layout->num_modules()) {
      refuse_task(run.task, call);
    }
    if (layout == last) {
      continue;
    }
    last = layout;
    const auto [first_row, end_row] = layout->rows_of(call.module);
    for (const RowShape& row : std::span(layout->rows()).subspan(first_row, end_row - first_row)) {
      if (row.kind != call.kind) {
        refuse_kind(call);
      }
      if (x_stride < std::int64_t{row.in.offset} + row.in.length) {
        refuse_stride("x", x_stride, row.in.offset + row.in.length, call.module);
      }
      if (y_stride < std::int64_t{row.out.offset} + row.out.length) {
        refuse_stride("y", y_stride, row.out.offset + row.out.length, call.module);
      }
    }
  }
}

}  // namespace pagedlora::internal
