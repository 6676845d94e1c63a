// Says whether this machine has a GPU that pagedlora can use.
#include <pagedlora/cuda/gpu_support.h>

#include <iostream>

int main() {
  const pagedlora::cuda::GpuSupport found = pagedlora::cuda::gpu_support();
  std::cout << pagedlora::cuda::gpu_state_name(found.state) << "\n" << found.detail << "\n";
  return 0;
}
