// y += LoRA(x) on a GPU for a batch whose rows use different adapters, from the device tier's pages:
// the owner of what the kernels of lora_kernels.h need.
//
// Per step set_batch() says which rows use which leased task; per module apply() enqueues two
// kernels. What the kernels read about a task is uploaded when it is first in a batch with its
// present pages, and found again in later steps; a step itself uploads 20 bytes per row at most, out
// of pinned memory: set_batch() waits for the stream only if the upload of the batch before is still
// on its way.
// Buffers have the size that the options say, for good. With `for_graphs` launches do not depend on
// the batch either, so that apply() may be captured in a graph once and replayed after any
// set_batch() of as many rows, which is called outside of it.
//
// Everything goes to the stream that is given: a batch's kernels, and the update for the next batch
// behind them. One stream at a time: whoever changes it orders the two.
//
// Thread-compatible; the GPU may be used by others meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "pagedlora/batch_lease.h"
#include "pagedlora/cuda/lora_tables.h"
#include "pagedlora/ids.h"
#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/lora_operator.h"

namespace pagedlora::cuda {

class DeviceBuffer;
class GpuContext;
class UploadStage;

struct CudaLoraOptions {
  std::uint32_t max_rows = 0;   // of one batch
  std::uint32_t max_tasks = 0;  // that are known at once; at least as many as one batch has
  LayoutParams layout;          // of the cache whose leases are given
  int ordinal = 0;              // the GPU
  bool for_graphs = false;      // launches are as large as max_rows, whatever the batch
  bool starts_early = false;    // see LoraLaunch; nothing on GPUs that cannot
};

class CudaLoraOperator {
 public:
  struct Segment {
    const BatchLease::LeasedTask* task = nullptr;  // null: rows of the base model
    std::uint32_t num_rows = 0;
  };

  // `config` is the cache's. Throws GpuUnavailableError, GpuCallError (no memory, for
  // one), or InvalidArgumentError for an option of 0.
  CudaLoraOperator(std::shared_ptr<const LoraModelConfig> config, const CudaLoraOptions& options);
  ~CudaLoraOperator();
  CudaLoraOperator(const CudaLoraOperator&) = delete;
  CudaLoraOperator& operator=(const CudaLoraOperator&) = delete;

  // Segments in row order; their lease must stay open until the kernels of this batch have run, or
  // be closed on `stream`. Throws InvalidArgumentError for more rows or tasks than the options say,
  // or a stream that is being captured, and as the constructor; there is no batch then.
  void set_batch(std::span<const Segment> segments, void* stream);
  void clear_batch() { num_rows_ = 0; }

  std::uint32_t num_rows() const { return num_rows_; }

  // Enqueues y += LoRA(x) for the batch's rows; pointers are the GPU's, and stay until the stream is
  // through. Throws InvalidArgumentError if the rows are not the batch's, the module is of the other
  // kind, a pointer is null or a stride less than the module's features, and as the constructor.
  void apply(ModuleIndex module, const Activations& activations, void* stream);
  void apply_embedding(ModuleIndex module, const EmbeddingActivations& activations, void* stream);

  // Bytes on the GPU.
  std::size_t device_bytes() const;

  // Tasks that need no upload when they are in a batch again.
  std::size_t num_known_tasks() const { return known_.size(); }

 private:
  struct Known {
    std::uint32_t slot = 0;
    std::shared_ptr<const Layout> layout;
    const std::byte* pool = nullptr;
    std::vector<PageId> pages;
    std::uint64_t last_batch = 0;

    bool is_at(const BatchLease::LeasedTask& leased) const;
  };

  std::uint32_t slot_of(const BatchLease::LeasedTask& leased);
  bool forget_oldest();
  void check_is_not_captured(void* stream);
  void upload(void* stream);
  void upload(const LoraTables::Change& change, void* stream);
  void check(ModuleIndex module, ModuleKind kind, const Activations& activations,
             const void* input) const;
  bool can_start_early();
  struct LoraPass;
  LoraPass pass_of(ModuleIndex module) const;
  bool has_nothing_to_launch() const;

  std::shared_ptr<const LoraModelConfig> config_;
  CudaLoraOptions options_;
  std::unique_ptr<GpuContext> gpu_;
  LoraTables tables_;
  std::unique_ptr<DeviceBuffer> table_;
  std::unique_ptr<DeviceBuffer> rank_space_;
  std::unique_ptr<UploadStage> stage_;  // of the part of the tables that each step rewrites
  std::unordered_map<TaskId, Known> known_;
  std::uint64_t batch_ = 0;
  std::uint32_t num_rows_ = 0;
  bool shares_weights_ = false;  // among the rows of a tile
  bool starts_early_ = false;
  bool is_zeroed_ = false;  // table_, as tables_ is before the first task
  bool is_stale_ = false;   // an upload failed: the GPU has not what tables_ says
  std::vector<LoraTables::Segment> segments_;  // of set_batch, kept for its memory
};

}  // namespace pagedlora::cuda
