// What one adapter consists of and where its bytes lie in its source: parsed once, kept for as
// long as the task is known, enough to read it again without asking anybody.
//
// Immutable after construction; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pagedlora/dtype.h"
#include "pagedlora/ids.h"
#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora {

// A row-major matrix in the source.
struct PlannedMatrix {
  std::uint64_t offset = 0;
  Dtype dtype = Dtype::float32;
};

// One module's A [rank, in_features] and B [out_features, rank].
struct PlannedRow {
  ModuleIndex module;
  std::uint32_t rank = 0;
  PlannedMatrix a;
  PlannedMatrix b;
  float scale = 1.0F;  // multiplies B A x; stored apart from the weights
};

class AdapterPlan {
 public:
  // Sorts the rows by module. Throws InvalidArgumentError for no rows, a module named twice or
  // unknown, a rank outside 1..config.max_lora_rank(), a scale that is not finite, or a matrix
  // beyond the end of the source.
  AdapterPlan(const LoraModelConfig& config, std::vector<PlannedRow> rows,
              std::shared_ptr<const TensorSource> source);

  const std::vector<PlannedRow>& rows() const { return rows_; }
  const std::vector<float>& scales() const { return scales_; }  // one per row
  const std::shared_ptr<const TensorSource>& source() const { return source_; }
  std::uint64_t config_fingerprint() const { return config_fingerprint_; }
  std::vector<RowShape> row_shapes() const;

  // The same rows without the source: what is left of weights that a request carried.
  std::shared_ptr<const AdapterPlan> without_source() const;

 private:
  std::vector<PlannedRow> rows_;
  std::vector<float> scales_;
  std::shared_ptr<const TensorSource> source_;
  std::uint64_t config_fingerprint_;
};

}  // namespace pagedlora
