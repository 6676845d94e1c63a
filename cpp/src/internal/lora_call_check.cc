#include "internal/lora_call_check.h"

#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

constexpr std::int64_t kNoStride = std::numeric_limits<std::int64_t>::max();  // not looked at

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
  check_module(call.module, task.layout->num_modules());
}

}  // namespace

void check_activations(const Activations& activations, const void* input, ModuleKind kind,
                       std::uint32_t batch_rows) {
  if (activations.num_rows != batch_rows) {
    throw InvalidArgumentError("activations have " + std::to_string(activations.num_rows) +
                               " rows, the batch has " + std::to_string(batch_rows));
  }
  if (activations.dtype > Dtype::bfloat16) {
    throw InvalidArgumentError("activations have a dtype of number " +
                               std::to_string(static_cast<int>(activations.dtype)) +
                               "; float32, float16 and bfloat16 are known");
  }
  if (activations.num_rows > 0 && (input == nullptr || activations.y == nullptr)) {
    const char* name = kind == ModuleKind::linear ? "x" : "token_ids";
    throw InvalidArgumentError(
        std::string(input == nullptr ? name : "y") + " is null, and the batch has " +
        std::to_string(activations.num_rows) + " rows: give the address of its first element");
  }
}

void check_module(ModuleIndex module, std::size_t num_modules) {
  if (module.value >= num_modules) {
    throw InvalidArgumentError("module index " + std::to_string(module.value) +
                               " given for a model with " + std::to_string(num_modules) +
                               " LoRA modules");
  }
}

void check_kind(ModuleIndex module, ModuleKind is, ModuleKind taken_for) {
  if (is != taken_for) {
    throw InvalidArgumentError("module index " + std::to_string(module.value) +
                               (is == ModuleKind::embedding
                                    ? " is an embedding: give its tokens to apply_embedding()"
                                    : " is linear: give its input to apply()"));
  }
}

void check_stride(const char* name, std::int64_t stride, std::uint64_t width, ModuleIndex module) {
  if (stride < static_cast<std::int64_t>(width)) {
    throw InvalidArgumentError("the row stride of " + std::string(name) + " is " +
                               std::to_string(stride) +
                               " elements, and adapters of the batch use " + std::to_string(width) +
                               " of each row of module index " + std::to_string(module.value) +
                               ": give a stride of as many or more");
  }
}

void check_call(const LoraCall& call) {
  const Activations& activations = call.activations;
  check_activations(activations, call.input, call.kind, call.batch.num_rows());
  const bool has_strides = activations.num_rows > 1;  // one row has whatever stride torch gives it
  const std::int64_t x_stride =
      has_strides && call.kind == ModuleKind::linear ? activations.x_row_stride : kNoStride;
  const std::int64_t y_stride = has_strides ? activations.y_row_stride : kNoStride;
  const Layout* last = nullptr;  // neighbours are often of one shape
  for (const LoraBatch::Run& run : call.batch.runs()) {
    const Layout* const layout = run.task.layout;
    check_task(run.task, call);
    if (layout == last) {
      continue;
    }
    last = layout;
    const auto [first_row, end_row] = layout->rows_of(call.module);
    for (const RowShape& row : std::span(layout->rows()).subspan(first_row, end_row - first_row)) {
      check_kind(call.module, row.kind, call.kind);
      check_stride("x", x_stride, std::uint64_t{row.in.offset} + row.in.length, call.module);
      check_stride("y", y_stride, std::uint64_t{row.out.offset} + row.out.length, call.module);
    }
  }
}

}  // namespace pagedlora::internal
