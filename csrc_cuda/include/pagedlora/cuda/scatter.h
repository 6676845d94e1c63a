// Carries out copies of scatter plans on the device.
//
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include "pagedlora/cuda/scatter_list.h"

namespace pagedlora::cuda {

// Launches all tiles of the work on `stream`; no tiles are a success. What the work points to must
// stay until the stream has done it. Returns what the launch returned. Whether a value overflowed
// float16 is known when the stream has done it: see ScatterList::add.
[[nodiscard]] cudaError_t launch_scatter(const ScatterWork& work, cudaStream_t stream);

}  // namespace pagedlora::cuda
