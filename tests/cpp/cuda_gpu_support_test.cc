// Why there is no GPU, as the runtime lets one tell (gpu_support.h).
#include <gtest/gtest.h>

#include "cuda_fake/fake_cuda.h"
#include "pagedlora/cuda/gpu_support.h"

namespace pagedlora {
namespace {

using cuda::gpu_support;
using cuda::GpuState;
using cuda::GpuSupport;

class GpuSupportTest : public ::testing::Test {
 protected:
  GpuSupportTest() { fake_cuda::reset(); }
};

TEST_F(GpuSupportTest, AGpuThatCanBeUsedNeedsNoAdvice) {
  fake_cuda::set_num_gpus(2);
  const GpuSupport found = gpu_support();
  EXPECT_EQ(found.state, GpuState::available);
  EXPECT_EQ(found.num_devices, 2);
  EXPECT_GT(found.runtime_version, 0);
  EXPECT_EQ(found.detail, "");
}

TEST_F(GpuSupportTest, NoDriverIsToldFromAnOldOne) {
  fake_cuda::set_driver_version(0);
  GpuSupport found = gpu_support();
  EXPECT_EQ(found.state, GpuState::no_driver);
  EXPECT_NE(found.detail.find("install one"), std::string::npos) << found.detail;

  fake_cuda::set_driver_version(11040);
  found = gpu_support();
  EXPECT_EQ(found.state, GpuState::driver_too_old);
  EXPECT_EQ(found.num_devices, 0);
  EXPECT_NE(found.detail.find("for CUDA 11.4"), std::string::npos) << found.detail;
}

TEST_F(GpuSupportTest, ADriverWithoutAGpuNamesWhatMayHideIt) {
  fake_cuda::set_num_gpus(0);
  const GpuSupport found = gpu_support();
  EXPECT_EQ(found.state, GpuState::no_device);
  EXPECT_NE(found.detail.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << found.detail;
}

TEST_F(GpuSupportTest, OtherErrorsAreGivenInTheRuntimesWords) {
  fake_cuda::break_gpu(cudaErrorIllegalAddress);
  const GpuSupport found = gpu_support();
  EXPECT_EQ(found.state, GpuState::broken);
  EXPECT_NE(found.detail.find("cudaErrorIllegalAddress"), std::string::npos) << found.detail;
}

}  // namespace
}  // namespace pagedlora
