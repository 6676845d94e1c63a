#include "pagedlora/cuda/lora_operator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "gpu_buffers.h"
#include "gpu_context.h"
#include "internal/lora_call_check.h"
#include "pagedlora/cuda/lora_kernels.h"
#include "pagedlora/errors.h"
#include "upload_stage.h"

namespace pagedlora::cuda {
namespace {

// Rows of a prompt that share a pass over their adapter's weights, and from how many rows per
// segment, in the mean, that is worth it.
constexpr std::uint32_t kSharedRows = 16;
constexpr std::uint32_t kFewRows = 4;

// An adapter for the parts of a fused module has a row for each: q, k and v, say.
constexpr std::uint32_t kMaxRowsPerModule = 4;

// Room in the tables for tasks of the largest rank on every module, each with a layout of its own,
// twice: rows may have biases and scales of their own, and room that is given back leaves gaps.
LoraTableCapacity capacity_for(const LoraModelConfig& config, const CudaLoraOptions& options) {
  if (options.max_rows == 0 || options.max_tasks == 0) {
    throw InvalidArgumentError("max_rows and max_tasks of CudaLoraOptions must be at least 1");
  }
  const auto rank = static_cast<std::uint32_t>(config.max_lora_rank());
  std::vector<RowShape> rows;
  rows.reserve(config.modules().size());
  for (std::uint32_t module = 0; module < config.modules().size(); ++module) {
    rows.push_back({.module = {module}, .rank = rank});
  }
  const Layout largest(config, std::move(rows), options.layout);
  const std::uint32_t blocks_per_row = (rank + kMaxBlockRanks - 1) / kMaxBlockRanks;
  return {options.max_rows, options.max_tasks, kMaxRowsPerModule * blocks_per_row,
          2 * options.max_tasks * LoraTables::layout_bytes(largest),
          2 * options.max_tasks * LoraTables::residency_bytes(largest)};
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

struct CudaLoraOperator::LoraPass {
  LoraLaunch launch;
  TokensPerPass tokens = TokensPerPass::one;
};

bool CudaLoraOperator::Known::is_at(const BatchLease::LeasedTask& leased) const {
  return layout == leased.layout && pool == leased.pages.base &&
         std::equal(pages.begin(), pages.end(), leased.pages.pages);
}

CudaLoraOperator::CudaLoraOperator(std::shared_ptr<const LoraModelConfig> config,
                                   const CudaLoraOptions& options)
    : config_(std::move(config)),
      options_(options),
      gpu_(std::make_unique<GpuContext>(options.ordinal)),
      tables_(capacity_for(*config_, options), config_->dtype()),
      table_(std::make_unique<DeviceBuffer>(*gpu_, tables_.bytes().size())) {
  const LoraTablesView view = tables_.view(nullptr);
  rank_space_ = std::make_unique<DeviceBuffer>(
      *gpu_, std::size_t{view.max_tokens} * view.max_blocks * kMaxBlockRanks * sizeof(float));
  const CurrentGpu current(*gpu_);
  current.check();
  stage_ = std::make_unique<UploadStage>(*gpu_, view.tasks);
  starts_early_ = options.starts_early && can_start_early();
}

bool CudaLoraOperator::can_start_early() {
  constexpr int kHopper = 9;
  int major = 0;
  gpu_->check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu_->ordinal()),
              "cudaDeviceGetAttribute");
  return major >= kHopper;
}

CudaLoraOperator::~CudaLoraOperator() {
  const CurrentGpu current(*gpu_);
  stage_.reset();
}

std::size_t CudaLoraOperator::device_bytes() const {
  return table_->bytes() + rank_space_->bytes();
}

void CudaLoraOperator::set_batch(std::span<const Segment> segments, void* stream) {
  gpu_->check_alive();
  clear_batch();
  const CurrentGpu current(*gpu_);
  current.check();
  check_is_not_captured(stream);
  ++batch_;
  segments_.clear();
  std::uint64_t num_rows = 0;
  std::uint64_t num_segments = 0;
  for (const Segment& segment : segments) {
    num_rows += segment.num_rows;
    if (segment.task == nullptr || segment.num_rows == 0) {
      segments_.push_back({std::nullopt, segment.num_rows});
      continue;
    }
    ++num_segments;
    segments_.push_back({slot_of(*segment.task), segment.num_rows});
  }
  if (num_rows > options_.max_rows) {
    throw InvalidArgumentError("a batch of " + std::to_string(num_rows) +
                               " rows; max_rows of CudaLoraOptions is " +
                               std::to_string(options_.max_rows));
  }
  shares_weights_ = !options_.for_graphs && num_rows >= kFewRows * num_segments;
  tables_.set_batch(segments_, shares_weights_ ? kSharedRows : 1);
  upload(stream);
  num_rows_ = static_cast<std::uint32_t>(num_rows);
}

// A task that was evicted and read again may lie elsewhere, or its old pages may be another's.
std::uint32_t CudaLoraOperator::slot_of(const BatchLease::LeasedTask& leased) {
  const auto found = known_.find(leased.task);
  if (found != known_.end()) {
    if (found->second.is_at(leased)) {
      found->second.last_batch = batch_;
      return found->second.slot;
    }
    tables_.remove_task(found->second.slot);
    known_.erase(found);
  }
  const PageId* pages = leased.pages.pages;
  Known known{
      0, leased.layout, leased.pages.base, {pages, pages + leased.layout->num_pages()}, batch_};
  std::optional<std::uint32_t> slot = tables_.try_add_task(leased.pages, leased.layout);
  while (!slot && forget_oldest()) {
    slot = tables_.try_add_task(leased.pages, leased.layout);
  }
  if (!slot) {
    throw InvalidArgumentError("a batch of more than " + std::to_string(options_.max_tasks) +
                               " adapters; raise max_tasks of CudaLoraOptions");
  }
  known.slot = *slot;
  try {
    known_.emplace(leased.task, std::move(known));
  } catch (...) {  // out of memory
    tables_.remove_task(*slot);
    throw;
  }
  return *slot;
}

// Makes room; false if every task is in the present batch.
bool CudaLoraOperator::forget_oldest() {
  const auto oldest = std::ranges::min_element(
      known_, {}, [](const auto& known) { return known.second.last_batch; });
  if (oldest == known_.end() || oldest->second.last_batch == batch_) {
    return false;
  }
  tables_.remove_task(oldest->second.slot);
  known_.erase(oldest);
  return true;
}

void CudaLoraOperator::check_is_not_captured(void* stream) {
  if (is_captured(*gpu_, as_stream(stream))) {
    throw InvalidArgumentError(
        "set_batch() on a stream of cuda:" + std::to_string(gpu_->ordinal()) +
        " that is being captured into a graph, whose launches would all be of this batch: call it "
        "before the capture, and before each launch of the graph");
  }
}

void CudaLoraOperator::upload(void* stream) {
  std::vector<LoraTables::Change> changes = tables_.take_changes();
  if (std::exchange(is_stale_, true)) {
    changes = {{0, tables_.bytes().size()}};
  }
  if (!is_zeroed_) {
    gpu_->check(cudaMemsetAsync(table_->begin(), 0, table_->bytes(), as_stream(stream)),
                "cudaMemsetAsync");
    is_zeroed_ = true;
  }
  for (const LoraTables::Change& change : changes) {
    upload(change, stream);
  }
  is_stale_ = false;
}

// The batch goes by the stage. The rest is rare, and goes from memory that is not pinned: the runtime
// has taken the bytes when a call returns, and writes them in the stream's order.
void CudaLoraOperator::upload(const LoraTables::Change& change, void* stream) {
  const std::size_t end = change.offset + change.bytes;
  const std::size_t staged_end = std::clamp(stage_->bytes(), change.offset, end);
  const std::byte* from = tables_.bytes().data();
  if (staged_end > change.offset) {
    stage_->upload({from + change.offset, staged_end - change.offset},
                   table_->begin() + change.offset, as_stream(stream));
  }
  if (end > staged_end) {
    gpu_->check(cudaMemcpyAsync(table_->begin() + staged_end, from + staged_end, end - staged_end,
                                cudaMemcpyHostToDevice, as_stream(stream)),
                "cudaMemcpyAsync");
  }
}

void CudaLoraOperator::check(ModuleIndex module, ModuleKind kind, const Activations& activations,
                             const void* input) const {
  gpu_->check_alive();
  internal::check_activations(activations, input, kind, num_rows_);
  internal::check_module(module, config_->modules().size());
  const LoraModule& shape = config_->module(module);
  internal::check_kind(module, shape.kind, kind);
  if (activations.num_rows < 2) {
    return;  // one row has whatever stride torch gives it
  }
  if (kind == ModuleKind::linear) {
    internal::check_stride("x", activations.x_row_stride, shape.in_features, module);
  }
  internal::check_stride("y", activations.y_row_stride, shape.out_features, module);
}

CudaLoraOperator::LoraPass CudaLoraOperator::pass_of(ModuleIndex module) const {
  const std::uint32_t num_tiles = options_.for_graphs ? options_.max_rows : tables_.num_tiles();
  return {{tables_.view(table_->begin()), module, num_tiles,
           reinterpret_cast<float*>(rank_space_->begin()), starts_early_},
          shares_weights_ ? TokensPerPass::four : TokensPerPass::one};
}

bool CudaLoraOperator::has_nothing_to_launch() const {
  return tables_.num_tiles() == 0 && !options_.for_graphs;
}

void CudaLoraOperator::apply(ModuleIndex module, const Activations& activations, void* stream) {
  check(module, ModuleKind::linear, activations, activations.x);
  if (has_nothing_to_launch()) {
    return;
  }
  const CurrentGpu current(*gpu_);
  current.check();
  const LoraPass pass = pass_of(module);
  gpu_->check(
      launch_lora_shrink(pass.launch, {activations.x, activations.x_row_stride, activations.dtype},
                         pass.tokens, as_stream(stream)),
      "lora_shrink");
  const auto out_features = static_cast<std::uint32_t>(config_->module(module).out_features);
  gpu_->check(launch_lora_expand(pass.launch,
                                 {activations.y, activations.y_row_stride, out_features,
                                  activations.base_bias, activations.dtype},
                                 pass.tokens, as_stream(stream)),
              "lora_expand");
}

void CudaLoraOperator::apply_embedding(ModuleIndex module, const EmbeddingActivations& activations,
                                       void* stream) {
  check(module, ModuleKind::embedding,
        {.y = activations.y,
         .y_row_stride = activations.y_row_stride,
         .num_rows = activations.num_rows,
         .dtype = activations.dtype},
        activations.token_ids);
  if (has_nothing_to_launch()) {
    return;
  }
  const CurrentGpu current(*gpu_);
  current.check();
  const LoraPass pass = pass_of(module);
  gpu_->check(launch_lora_look_up(pass.launch, {activations.token_ids, activations.factor},
                                  as_stream(stream)),
              "lora_look_up");
  const auto out_features = static_cast<std::uint32_t>(config_->module(module).out_features);
  gpu_->check(launch_lora_expand(pass.launch,
                                 {activations.y, activations.y_row_stride, out_features, nullptr,
                                  activations.dtype},
                                 pass.tokens, as_stream(stream)),
              "lora_expand");
}

}  // namespace pagedlora::cuda
