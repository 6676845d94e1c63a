#include "body/lora_expand.h"

#include "pagedlora/cuda/lora_kernels.h"
#include "run_body.cuh"
#include "with_dtype.h"

namespace pagedlora::cuda {
namespace {

template <class Y, class W, std::uint32_t kTokens>
cudaError_t expand(const LoraLaunch& launch, const ExpandArgs& args, cudaStream_t stream) {
  using Body = LoraExpand<Y, W, kTokens>;
  const Body body{launch.tables,     launch.module.value,
                  launch.rank_space, static_cast<Y*>(args.y),
                  args.y_row_stride, static_cast<const Y*>(args.base_bias)};
  const std::uint32_t output_tiles = (args.out_features + Body::kThreads - 1) / Body::kThreads;
  return launch_body(body, launch.num_tiles, output_tiles, stream, launch.starts_early);
}

}  // namespace

cudaError_t launch_lora_expand(const LoraLaunch& launch, const ExpandArgs& args,
                               TokensPerPass tokens, cudaStream_t stream) {
  return with_dtype(args.dtype, [&]<class Y>(Y) {
    return with_dtype(launch.tables.weights, [&]<class W>(W) {
      return tokens == TokensPerPass::one ? expand<Y, W, 1>(launch, args, stream)
                                          : expand<Y, W, 4>(launch, args, stream);
    });
  });
}

}  // namespace pagedlora::cuda
