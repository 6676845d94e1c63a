#include "pagedlora/adapter_plan.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "internal/printable.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

void check_matrix(const LoraModule& module, const PlannedMatrix& matrix, std::uint32_t rows,
                  std::uint32_t columns, std::uint64_t source_bytes) {
  if (matrix.row_stride != 0 && matrix.row_stride < columns) {
    throw InvalidArgumentError("rows of " + std::to_string(columns) + " elements of module " +
                               internal::in_quotes(module.name) + " lie only " +
                               std::to_string(matrix.row_stride) + " apart in the source");
  }
  const std::uint64_t stride = matrix.row_stride == 0 ? columns : matrix.row_stride;
  const std::uint64_t bytes = ((rows - 1) * stride + columns) * element_bytes(matrix.dtype);
  if (matrix.offset > source_bytes || bytes > source_bytes - matrix.offset) {
    throw InvalidArgumentError("a matrix of module " + internal::in_quotes(module.name) +
                               " ends beyond its source of " + std::to_string(source_bytes) +
                               " bytes");
  }
}

void check_vector(const LoraModule& module, const PlannedVector& vector, std::uint32_t length,
                  std::uint64_t source_bytes) {
  if (vector.is_there()) {
    check_matrix(module, {vector.offset, vector.dtype}, 1, length, source_bytes);
  }
}

void resolve_slices(const LoraModelConfig& config, PlannedRow& row) {
  if (row.module.value >= config.modules().size()) {
    throw InvalidArgumentError("an adapter row names module " + std::to_string(row.module.value) +
                               " of " + std::to_string(config.modules().size()));
  }
  const LoraModule& module = config.module(row.module);
  row.in = resolved(row.in, module.in_features);
  row.out = resolved(row.out, module.out_features);
  row.kind = module.kind;
}

bool comes_first(const PlannedRow& a, const PlannedRow& b) {
  return std::tie(a.module, a.out, a.in) < std::tie(b.module, b.out, b.in);
}

void check_row(const LoraModelConfig& config, const PlannedRow& row, std::uint64_t source_bytes) {
  const LoraModule& module = config.module(row.module);
  if (row.rank < 1 || row.rank > static_cast<std::uint32_t>(config.max_lora_rank())) {
    throw InvalidArgumentError("LoRA rank " + std::to_string(row.rank) +
                               " is greater than max_lora_rank " +
                               std::to_string(config.max_lora_rank()) + " or below 1, at module " +
                               internal::in_quotes(module.name));
  }
  if (!std::isfinite(row.scale)) {
    throw InvalidArgumentError("the LoRA scale of module " + internal::in_quotes(module.name) +
                               " is not finite");
  }
  check_matrix(module, row.a, row.rank, row.in.length, source_bytes);
  check_matrix(module, row.b, row.out.length, row.rank, source_bytes);
  check_vector(module, row.bias, row.out.length, source_bytes);
  check_vector(module, row.dora_scale, row.out.length, source_bytes);
  if (row.dora_scale.is_there() && row.dora_scale.dtype != Dtype::float32) {
    throw InvalidArgumentError("the DoRA scale of module " + internal::in_quotes(module.name) +
                               " is not float32");
  }
}

}  // namespace

AdapterPlan::AdapterPlan(const LoraModelConfig& config, std::vector<PlannedRow> rows,
                         std::shared_ptr<const TensorSource> source, bool checks_values)
    : rows_(std::move(rows)),
      source_(std::move(source)),
      config_fingerprint_(config.fingerprint()),
      checks_values_(checks_values) {
  if (source_ == nullptr) {
    throw InvalidArgumentError("an adapter plan needs a source");
  }
  for (PlannedRow& row : rows_) {
    resolve_slices(config, row);
    check_row(config, row, source_->size_bytes());
  }
  std::ranges::sort(rows_, comes_first);
  check_slices(config, row_shapes());
  rows_.shrink_to_fit();
  scales_.reserve(rows_.size());
  for (const PlannedRow& row : rows_) {
    scales_.push_back(row.scale);
  }
}

std::vector<RowShape> AdapterPlan::row_shapes() const {
  std::vector<RowShape> shapes;
  shapes.reserve(rows_.size());
  for (const PlannedRow& row : rows_) {
    shapes.push_back({row.module, row.rank, row.in, row.out, row.bias.is_there(),
                      row.dora_scale.is_there(), row.kind});
  }
  return shapes;
}

std::shared_ptr<const AdapterPlan> AdapterPlan::without_source() const {
  auto copy = std::make_shared<AdapterPlan>(*this);
  copy->source_.reset();
  return copy;
}

}  // namespace pagedlora
