// y += LoRA(x) on the device for a batch whose tokens use different adapters, straight from pages:
// a shrink (or look-up) and an expand per module.
//
// LoraOperator (lora_operator.h) is the same on the CPU, and holds for both: float32 accumulation
// in fixed order, results that do not depend on neighbours, on the place in the batch or on how it
// was cut into tiles; tokens without an adapter, or whose adapter does not touch the module, are not
// read or written. Here that is so to the bit: tokens_per_pass and the tiles change nothing.
// body/lora_shrink.h and body/lora_expand.h state the order of the sums.
//
// Error of an output, relative to the sum of the magnitudes of all its terms, in units of the
// roundoff of float32, beside the one rounding of y per row:
//     8 ceil(length / 1024) for each part of the block's A    a lane's products
//     7 + 1                                                  the tree of lanes, the scale
//     4 + number of blocks + 1                               B t, and y
// and 6 more where there is a bias or a DoRA scale.
//
// Launches return what the runtime says of them, enqueue one kernel on `stream`, and may be captured in
// a graph: their grids follow from the arguments alone. What the arguments point to must stay until
// the stream has done the work. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "pagedlora/cuda/lora_records.h"
#include "pagedlora/ids.h"

namespace pagedlora::cuda {

// What all three kernels are about.
struct LoraLaunch {
  LoraTablesView tables;  // LoraTables::view of the device's buffer
  ModuleIndex module;
  std::uint32_t num_tiles = 0;  // at least LoraTables::num_tiles(); for graphs tables.max_tokens
  // Of float32, [tables.max_tokens, tables.max_blocks, 8], aligned to 16: between shrink and expand.
  float* rank_space = nullptr;
  // Kernels look up and load their weights while the kernel before them on the stream still runs, if
  // that is one of these; all else waits for its end. What they find weights by, and the weights, must
  // have been written before that one was launched. Of GPUs of compute capability 9.0 and newer.
  bool starts_early = false;
};

// Tokens for which a thread block reads weights once: few for decode steps, more for prompts.
enum class TokensPerPass : std::uint8_t { one, four };

struct ShrinkArgs {
  const void* x = nullptr;        // [tokens of the batch, in_features], `dtype`
  std::int64_t x_row_stride = 0;  // in elements
  Dtype dtype = Dtype::float32;
};

struct LookUpArgs {
  const std::int64_t* token_ids = nullptr;  // [tokens of the batch]
  float factor = 1.0F;                      // by which the embedding multiplies what it looks up
};

struct ExpandArgs {
  void* y = nullptr;              // [tokens of the batch, out_features], `dtype`
  std::int64_t y_row_stride = 0;  // in elements
  std::uint32_t out_features = 0;
  const void* base_bias = nullptr;  // [out_features], `dtype`, for DoRA; null: the module has none
  Dtype dtype = Dtype::float32;
};

// rank_space = scale * A x. Of a linear module.
[[nodiscard]] cudaError_t launch_lora_shrink(const LoraLaunch& launch, const ShrinkArgs& args,
                                             TokensPerPass tokens, cudaStream_t stream);

// rank_space = factor * scale * A[:, token]. Of an embedding.
[[nodiscard]] cudaError_t launch_lora_look_up(const LoraLaunch& launch, const LookUpArgs& args,
                                              cudaStream_t stream);

// y += B rank_space, with bias and DoRA scale. After either, on the same stream. At most 8,388,480
// outputs.
[[nodiscard]] cudaError_t launch_lora_expand(const LoraLaunch& launch, const ExpandArgs& args,
                                             TokensPerPass tokens, cudaStream_t stream);

}  // namespace pagedlora::cuda
