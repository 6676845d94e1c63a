// Launches a kernel body (body/kernel_index.h says what that is).
#pragma once

#include <cuda_runtime.h>

#include "body/kernel_index.h"

namespace pagedlora::cuda {

template <class Body>
__global__ void __launch_bounds__(Body::kThreads) run_body(const Body body) {
  __shared__ typename Body::Shared shared;
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
}

// An empty grid launches nothing and is a success. Otherwise what the launch returned; errors of
// the kernel itself come later, as always.
template <class Body>
cudaError_t launch_body(const Body& body, std::uint32_t blocks_x, std::uint32_t blocks_y,
                        cudaStream_t stream) {
  if (blocks_x == 0 || blocks_y == 0) {
    return cudaSuccess;
  }
  run_body<Body><<<dim3(blocks_x, blocks_y), Body::kThreads, 0, stream>>>(body);
  return cudaGetLastError();
}

}  // namespace pagedlora::cuda
