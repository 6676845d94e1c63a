#include "pagedlora/cuda/scatter.h"

#include "body/scatter_rows.h"
#include "run_body.cuh"

namespace pagedlora::cuda {

cudaError_t launch_scatter(const ScatterWork& work, cudaStream_t stream) {
  return launch_body(ScatterRows{work}, work.num_tiles, 1, stream);
}

}  // namespace pagedlora::cuda
