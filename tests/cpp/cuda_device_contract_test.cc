// CudaDevice keeps the contract of a device, over the runtime of cuda_fake/.
#include "cuda_fake/fake_cuda.h"
#include "device_contract.h"
#include "pagedlora/cuda/cuda_device.h"

namespace pagedlora::testing_support {
namespace {

std::shared_ptr<Device> make_gpu() {
  fake_cuda::reset();
  return cuda::make_cuda_device();
}

std::shared_ptr<Device> make_gpu_without_batches() {
  fake_cuda::reset();
  fake_cuda::refuse_batches(cudaErrorNotSupported);
  return cuda::make_cuda_device();
}

std::shared_ptr<Device> make_second_gpu() {
  fake_cuda::reset();
  fake_cuda::set_num_gpus(2);
  return cuda::make_cuda_device({.ordinal = 1});
}

std::shared_ptr<Device> make_pinned() { return make_gpu()->host_tier_device(); }

INSTANTIATE_TEST_SUITE_P(
    CudaOverFakeRuntime, DeviceContractTest,
    ::testing::Values(DeviceMaker{.name = "cuda", .make = make_gpu},
                      DeviceMaker{.name = "cuda_without_batches", .make = make_gpu_without_batches},
                      DeviceMaker{.name = "second_gpu", .make = make_second_gpu},
                      DeviceMaker{.name = "pinned_host", .make = make_pinned}),
    name_of);

}  // namespace
}  // namespace pagedlora::testing_support
