// Launches a kernel body (body/kernel_index.h says what that is).
#pragma once

#include <cuda_runtime.h>

#include "body/kernel_index.h"

namespace pagedlora::cuda {

// From here on a kernel that may start early can do so on what this one leaves free.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class Body>
__global__ void __launch_bounds__(Body::kThreads, Body::kResidentBlocks) run_body(const Body body) {
  __shared__ typename Body::Shared shared;
  if constexpr (Body::kLetsNextStart) {
    let_next_kernel_start();
  }
  const typename Body::Thread thread = body.start({blockIdx.x, blockIdx.y, threadIdx.x});
  const std::uint32_t rounds = body.rounds(thread);
  for (std::uint32_t round = 0; round < rounds; ++round) {
    PAGEDLORA_UNROLL
    for (std::uint32_t phase = 0; phase < Body::kPhases; ++phase) {
      body.run(phase, round, thread, shared);
      if constexpr (Body::kPhases > 1) {
        __syncthreads();
      }
    }
  }
  // A kernel's end stands for that of all before it: somebody must have waited for them.
  if (rounds != 0 || (blockIdx.x == 0 && blockIdx.y == 0)) {
    wait_for_stream();
  }
}

// starts_early: when the kernel before it on the stream has let it, not when that one has ended. Of
// GPUs of compute capability 9.0 and newer. An empty grid launches nothing and is a success. Otherwise what the launch returned; errors of
// the kernel itself come later, as always.
template <class Body>
cudaError_t launch_body(const Body& body, std::uint32_t blocks_x, std::uint32_t blocks_y,
                        cudaStream_t stream, bool starts_early = false) {
  if (blocks_x == 0 || blocks_y == 0) {
    return cudaSuccess;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks_x, blocks_y);
  config.blockDim = dim3(Body::kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, run_body<Body>, body);
}

}  // namespace pagedlora::cuda
