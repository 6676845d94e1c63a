// y += scale * B (A x) for a batch whose rows use different adapters, straight from cache pages;
// with the biases and DoRA scales that adapters have (adapter_plan.h has the formula).
//
// LoraBatch is the table of one step: which rows of x use which task. It is built once per step and
// used for every module. LoraOperator applies it to one module at a time.
//
// Arithmetic: A x is accumulated in float32, in an order that depends only on the sizes of the
// module and on the layout; the scale multiplies that rank-space accumulator; B t is accumulated
// in float32 over all blocks of the row and added to y in one rounding. An adapter with several
// rows for a module (slices of it) adds one after the other, in the order of the layout. So a
// result does not depend on its neighbours, on the length of its run or on its place in the batch.
// Rows without an adapter, and rows whose adapter does not touch the module, are not read or
// written.
//
// LoraBatch: immutable after construction. LoraOperator: thread-compatible (it owns scratch
// memory); use one per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"
#include "pagedlora/ids.h"
#include "pagedlora/layout.h"

namespace pagedlora {

namespace internal {
struct LoraKernels;
struct ReadAhead;
}  // namespace internal

class LoraBatch {
 public:
  struct Segment {
    std::optional<TaskPages> task;  // nullopt: base model rows
    std::uint32_t num_rows = 0;
  };
  struct Run {
    TaskPages task;
    std::uint32_t first_row = 0;
    std::uint32_t num_rows = 0;
  };

  // Segments in row order. Neighbouring segments of one task (same layout, pages and pool) become
  // one run. Throws InvalidArgumentError for a task without a layout, or 2^32 rows or more.
  explicit LoraBatch(std::span<const Segment> segments);

  std::span<const Run> runs() const { return runs_; }  // of rows with an adapter, ascending
  std::uint32_t num_rows() const { return num_rows_; }
  bool has_dora_scales() const;  // whether any adapter of it needs Activations::base_bias

  // By module index, 1 where any adapter of the batch has a row, else 0; empty without adapters.
  std::span<const std::uint8_t> touched_modules() const { return touched_modules_; }

 private:
  void touch_modules(const Layout& layout);

  std::vector<Run> runs_;
  std::vector<std::uint8_t> touched_modules_;
  std::uint32_t num_rows_ = 0;
};

// Row-major activations; strides count elements between rows.
struct Activations {
  const void* x = nullptr;  // [num_rows, in_features]
  void* y = nullptr;        // [num_rows, out_features]
  std::int64_t x_row_stride = 0;
  std::int64_t y_row_stride = 0;
  std::uint32_t num_rows = 0;
  Dtype dtype = Dtype::float32;     // of x, y and base_bias
  const void* base_bias = nullptr;  // [out_features]: the module's own, for DoRA; null: it has none
};

// Tokens that an embedding has looked up.
struct EmbeddingActivations {
  const std::int64_t* token_ids = nullptr;  // [num_rows]
  void* y = nullptr;                        // [num_rows, out_features]
  std::int64_t y_row_stride = 0;            // in elements
  std::uint32_t num_rows = 0;
  Dtype dtype = Dtype::float32;  // of y
  float factor = 1.0F;           // by which the module multiplies what it looks up
};

class LoraOperator {
 public:
  // `weights_dtype` is the dtype of the cache's pages. Throws InvalidArgumentError for an `isa`
  // beyond best_isa().
  explicit LoraOperator(Dtype weights_dtype, Isa isa = default_isa());
  LoraOperator(LoraOperator&&) noexcept;
  LoraOperator& operator=(LoraOperator&&) noexcept;
  ~LoraOperator();

  // Adds the adapters' outputs for `module` to y. Throws InvalidArgumentError, with y unchanged, if
  // num_rows differs from the batch's, x or y is null, rows that adapters use are nearer than they
  // are wide, a task's pages hold elements of another dtype or the module is an embedding. x and y
  // must not overlap and need only the alignment of their elements. Reads every page through the
  // batch's views; never blocks.
  void apply(const LoraBatch& batch, ModuleIndex module, const Activations& activations);

  // The same for an embedding: delta = factor * scale * B A[:, token]. A token outside of a row's
  // slice of the vocabulary gets no delta from it.
  void apply_embedding(const LoraBatch& batch, ModuleIndex module,
                       const EmbeddingActivations& activations);

 private:
  struct Call;
  struct Scratch;
  struct Tile;
  struct Work;

  void apply(const LoraBatch& batch, ModuleIndex module, const Call& call);
  void find_work(const LoraBatch& batch, ModuleIndex module, ModuleKind kind);
  void apply_run(const internal::LoraKernels& kernels, const Work& work, const Call& call,
                 internal::ReadAhead& ahead);
  void look_up(const Tile& tile);
  void shrink(const internal::LoraKernels& kernels, const Layout& layout, const Tile& tile);
  void expand(const internal::LoraKernels& kernels, Dtype dtype, const Tile& tile);
  void expand_with_vectors(Dtype dtype, const Tile& tile);

  Dtype weights_dtype_;
  Isa isa_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace pagedlora
