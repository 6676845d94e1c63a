// CudaDevice keeps the contract of a device on a GPU.
#include "device_contract.h"
#include "pagedlora/cuda/cuda_device.h"
#include "pagedlora/cuda/gpu_support.h"

namespace pagedlora::testing_support {
namespace {

bool has_gpu() { return cuda::gpu_support().state == cuda::GpuState::available; }

std::shared_ptr<Device> make_gpu() { return cuda::make_cuda_device(); }
std::shared_ptr<Device> make_pinned() { return make_gpu()->host_tier_device(); }

INSTANTIATE_TEST_SUITE_P(
    Gpu, DeviceContractTest,
    ::testing::Values(DeviceMaker{.name = "cuda", .make = make_gpu, .is_there = has_gpu},
                      DeviceMaker{.name = "pinned_host", .make = make_pinned, .is_there = has_gpu}),
    name_of);

}  // namespace
}  // namespace pagedlora::testing_support
