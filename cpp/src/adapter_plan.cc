#include "pagedlora/adapter_plan.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

void check_row(const LoraModelConfig& config, const PlannedRow& row, std::uint64_t source_bytes) {
  if (row.module.value >= config.modules().size()) {
    throw InvalidArgumentError("an adapter row names module " + std::to_string(row.module.value) +
                               " of " + std::to_string(config.modules().size()));
  }
  const LoraModule& module = config.module(row.module);
  if (row.rank < 1 || row.rank > static_cast<std::uint32_t>(config.max_lora_rank())) {
    throw InvalidArgumentError(
        "LoRA rank " + std::to_string(row.rank) + " is greater than max_lora_rank " +
        std::to_string(config.max_lora_rank()) + " or below 1, at module " + module.name);
  }
  if (!std::isfinite(row.scale)) {
    throw InvalidArgumentError("the LoRA scale of module " + module.name + " is not finite");
  }
  const auto check_range = [&](const PlannedMatrix& matrix, std::int64_t features) {
    const std::uint64_t bytes =
        row.rank * static_cast<std::uint64_t>(features) * element_bytes(matrix.dtype);
    if (matrix.offset > source_bytes || bytes > source_bytes - matrix.offset) {
      throw InvalidArgumentError("a matrix of module " + module.name +
                                 " ends beyond its source of " + std::to_string(source_bytes) +
                                 " bytes");
    }
  };
  check_range(row.a, module.in_features);
  check_range(row.b, module.out_features);
}

}  // namespace

AdapterPlan::AdapterPlan(const LoraModelConfig& config, std::vector<PlannedRow> rows,
                         std::shared_ptr<const TensorSource> source)
    : rows_(std::move(rows)),
      source_(std::move(source)),
      config_fingerprint_(config.fingerprint()) {
  if (source_ == nullptr) {
    throw InvalidArgumentError("an adapter plan needs a source");
  }
  if (rows_.empty()) {
    throw InvalidArgumentError("an adapter without rows would answer like the base model");
  }
  std::ranges::sort(rows_, {}, &PlannedRow::module);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    check_row(config, rows_[i], source_->size_bytes());
    if (i > 0 && rows_[i - 1].module == rows_[i].module) {
      throw InvalidArgumentError("module " + config.module(rows_[i].module).name +
                                 " has two rows in one adapter");
    }
  }
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
    shapes.push_back({row.module, row.rank});
  }
  return shapes;
}

std::shared_ptr<const AdapterPlan> AdapterPlan::without_source() const {
  auto copy = std::make_shared<AdapterPlan>(*this);
  copy->source_.reset();
  return copy;
}

}  // namespace pagedlora
