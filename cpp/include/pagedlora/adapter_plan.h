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

// A row-major matrix in the source, or some rows and columns of a bigger one.
struct PlannedMatrix {
  std::uint64_t offset = 0;  // of its first element, in bytes
  Dtype dtype = Dtype::float32;
  std::uint32_t row_stride = 0;  // elements between the starts of rows; 0: they lie back to back
};

// A vector in the source; by default there is none.
struct PlannedVector {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  std::uint64_t offset = kNone;  // in bytes
  Dtype dtype = Dtype::float32;

  bool is_there() const { return offset != kNone; }
};

// A [rank, in.length] and B [out.length, rank] of a module, or of a slice of it, with what belongs
// to them. With y and x for the slices of the module's output and input, and base_bias the module's
// own:
//   delta = scale * (B A x + bias)             A[:, x] instead of A x for an embedding
//   y += delta                                                  without dora_scale
//   y += (dora_scale - 1) * (y - base_bias) + dora_scale * delta          with it
// Rows of one module add up.
struct PlannedRow {
  ModuleIndex module;
  std::uint32_t rank = 0;
  PlannedMatrix a;
  PlannedMatrix b;
  float scale = 1.0F;    // multiplies B A x; stored apart from the weights
  FeatureRange in = {};  // length 0 means: to the module's end
  FeatureRange out = {};
  PlannedVector bias = {};               // [out.length]
  PlannedVector dora_scale = {};         // [out.length], float32: the magnitude over the norm of W
  ModuleKind kind = ModuleKind::linear;  // of the module; filled in by AdapterPlan
};

class AdapterPlan {
 public:
  // Sorts the rows by module and slice, and writes out the lengths of slices. No rows are possible:
  // on a rank of a pipeline an adapter may touch none of the modules; it takes no pages there. Throws
  // InvalidArgumentError for an unknown module, a slice beyond a module, two rows for the same inputs
  // and outputs, a rank outside 1..config.max_lora_rank(), a scale that is not finite, rows of a
  // matrix that overlap, a matrix or vector beyond the end of the source, or a row with a dora_scale
  // that shares outputs with another row.
  // With `checks_values`, the first read of the source refuses NaN, infinity, and what is infinity
  // in the cache's type.
  AdapterPlan(const LoraModelConfig& config, std::vector<PlannedRow> rows,
              std::shared_ptr<const TensorSource> source, bool checks_values = false);

  const std::vector<PlannedRow>& rows() const { return rows_; }
  const std::vector<float>& scales() const { return scales_; }  // one per row
  const std::shared_ptr<const TensorSource>& source() const { return source_; }
  std::uint64_t config_fingerprint() const { return config_fingerprint_; }
  bool checks_values() const { return checks_values_; }
  std::vector<RowShape> row_shapes() const;

  // The same rows without the source: what is left of weights that a request carried.
  std::shared_ptr<const AdapterPlan> without_source() const;

 private:
  std::vector<PlannedRow> rows_;
  std::vector<float> scales_;
  std::shared_ptr<const TensorSource> source_;
  std::uint64_t config_fingerprint_;
  bool checks_values_;
};

}  // namespace pagedlora
