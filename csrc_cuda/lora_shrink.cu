#include "body/lora_shrink.h"

#include "body/lora_look_up.h"
#include "pagedlora/cuda/lora_kernels.h"
#include "run_body.cuh"
#include "with_dtype.h"

namespace pagedlora::cuda {
namespace {

template <class X, class W, std::uint32_t kTokens>
cudaError_t shrink(const LoraLaunch& launch, const ShrinkArgs& args, cudaStream_t stream) {
  const LoraShrink<X, W, kTokens> body{
      launch.tables,     launch.module.value, static_cast<const X*>(args.x),
      args.x_row_stride, launch.rank_space,   launch.tables.max_blocks};
  return launch_body(body, launch.num_tiles, launch.tables.max_blocks, stream, launch.starts_early);
}

}  // namespace

cudaError_t launch_lora_shrink(const LoraLaunch& launch, const ShrinkArgs& args,
                               TokensPerPass tokens, cudaStream_t stream) {
  return with_dtype(args.dtype, [&]<class X>(X) {
    return with_dtype(launch.tables.weights, [&]<class W>(W) {
      return tokens == TokensPerPass::one ? shrink<X, W, 1>(launch, args, stream)
                                          : shrink<X, W, 4>(launch, args, stream);
    });
  });
}

cudaError_t launch_lora_look_up(const LoraLaunch& launch, const LookUpArgs& args,
                                cudaStream_t stream) {
  return with_dtype(launch.tables.weights, [&]<class W>(W) {
    const LoraLookUp<W> body{launch.tables, launch.module.value, args.token_ids, args.factor,
                             launch.rank_space};
    return launch_body(body, launch.num_tiles, launch.tables.max_blocks, stream,
                       launch.starts_early);
  });
}

}  // namespace pagedlora::cuda
