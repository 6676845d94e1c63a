// Calls of the CUDA runtime that fail, each in turn: nothing leaks, what is reported is of a type,
// and either the device works on or it says that it is dead.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

#include "cuda_fixture.h"
#include "device_contract.h"
#include "gpu_context.h"
#include "pagedlora/errors.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using cuda::make_cuda_device;
using testing_support::Arena;
using testing_support::becomes_true;
using testing_support::ComputeStream;
using testing_support::HeldRead;
using testing_support::kPage;
using testing_support::pattern;
using testing_support::thrown_by;

constexpr std::size_t kPages = 6;

class CudaDeviceFailureTest : public ::testing::Test {
 protected:
  CudaDeviceFailureTest() { fake_cuda::reset(); }
};

std::vector<CopyRun> page_by_page(const std::byte* from, std::byte* to) {
  std::vector<CopyRun> runs;
  for (std::size_t i = 0; i < kPages; ++i) {
    runs.push_back({from + i * kPage, to + i * kPage, kPage});
  }
  return runs;
}

// Makes a device, fills two tiers and copies there and back, behind a kernel. True if all of it
// went well; false if there was no memory; throws what the device throws.
bool use_a_device(std::shared_ptr<Device>& device, const ComputeStream& stream, unsigned seed) {
  if (device == nullptr) {
    device = make_cuda_device();
  }
  static_cast<void>(device->memory_info());
  const Arena on_host(device->host_tier_device(), kPages * kPage);
  const Arena on_gpu(device, kPages * kPage);
  if (on_host.begin() == nullptr || on_gpu.begin() == nullptr) {
    return false;
  }
  const std::vector<std::byte> content = pattern(kPages * kPage, seed);
  std::ranges::copy(content, on_host.begin());
  HeldRead kernel(stream, on_gpu.begin(), kPage);
  kernel.gate.open();
  PageUses work{device->launched_work(stream.get())};
  if (work.front() == nullptr) {
    work.clear();
  }
  device->copy_from_host_behind(work, page_by_page(on_host.begin(), on_gpu.begin()));
  std::vector<std::byte> back(kPages * kPage);
  device->copy_to_host(page_by_page(on_gpu.begin(), back.data()));
  EXPECT_EQ(back, content) << "copies that were said to be done";
  for (const std::shared_ptr<const PageUse>& use : work) {
    EXPECT_TRUE(becomes_true([&] { return use->is_over(); }));
  }
  return true;
}

enum class Ending { done, no_memory, failed, dead };

Ending try_to_use_a_device(std::shared_ptr<Device>& device, const ComputeStream& stream,
                           unsigned seed) {
  try {
    return use_a_device(device, stream, seed) ? Ending::done : Ending::no_memory;
  } catch (const GpuCallError& error) {
    EXPECT_FALSE(error.call.empty());
    return Ending::failed;
  } catch (const GpuUnavailableError&) {
    return Ending::dead;
  }
}

TEST_F(CudaDeviceFailureTest, AfterAnyCallThatFailsOnceTheDeviceWorksOnOrSaysThatItIsDead) {
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
    long calls = 0;
    for (bool has_failed = true; has_failed; ++calls) {
      SCOPED_TRACE("call " + std::to_string(calls));
      const ComputeStream stream;
      std::shared_ptr<Device> device;
      fake_cuda::fail_call_after(calls, error);
      const Ending ending = try_to_use_a_device(device, stream, 1);
      has_failed = fake_cuda::has_failed();
      fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
      if (ending == Ending::dead && device != nullptr) {
        // Only a wait that failed leaves open what still runs.
        EXPECT_THROW(use_a_device(device, stream, 2), GpuUnavailableError);
      } else {
        EXPECT_TRUE(use_a_device(device, stream, 2));
      }
      ASSERT_EQ(fake_cuda::num_pending_errors(), 0);
      ASSERT_LT(calls, 200);
    }
    EXPECT_GT(calls, 15);
  }
}

TEST_F(CudaDeviceFailureTest, AnErrorThatStaysKillsTheDeviceWhereverItComes) {
  long calls = 0;
  for (bool has_failed = true; has_failed; ++calls) {
    SCOPED_TRACE("call " + std::to_string(calls));
    fake_cuda::reset();
    const ComputeStream stream;
    std::shared_ptr<Device> device = make_cuda_device();
    fake_cuda::fail_call_after(calls, cudaErrorIllegalAddress);
    std::byte* arena = nullptr;
    try {
      arena = device->try_allocate(kPage);
      const std::vector<std::byte> content = pattern(kPage, 1);
      const std::shared_ptr<const PageUse> work = device->launched_work(stream.get());
      device->copy_from_host(std::vector<CopyRun>{{content.data(), arena, kPage}});
      EXPECT_TRUE(work == nullptr || becomes_true([&] { return work->is_over(); }));
    } catch (const GpuUnavailableError&) {
    }
    has_failed = fake_cuda::has_failed();
    if (has_failed) {
      EXPECT_THROW(static_cast<void>(device->memory_info()), GpuUnavailableError);
      EXPECT_EQ(device->launched_work(stream.get()), nullptr);
    }
    if (arena != nullptr) {
      device->deallocate(arena, kPage);
    }
    ASSERT_LT(calls, 100);
  }
  EXPECT_GT(calls, 8);
}

TEST_F(CudaDeviceFailureTest, ADeadDeviceSaysWhatKilledItAndDoesNothingAnyMore) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  const auto work = device->launched_work(stream.get());
  fake_cuda::break_gpu(cudaErrorIllegalAddress);
  std::vector<std::byte> content(kPage);
  const std::vector<CopyRun> there{{content.data(), arena.begin(), kPage}};
  const std::vector<CopyRun> back{{arena.begin(), content.data(), kPage}};
  const auto error = thrown_by<GpuUnavailableError>([&] { device->copy_from_host(there); });
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(error->reason.find("cudaErrorIllegalAddress"), std::string::npos) << error->reason;
  EXPECT_NE(error->reason.find("cuda:0"), std::string::npos) << error->reason;
  const std::size_t calls = fake_cuda::counts().calls;
  EXPECT_THROW(device->copy_from_host(there), GpuUnavailableError);
  EXPECT_THROW(device->copy_to_host(back), GpuUnavailableError);
  EXPECT_THROW(device->copy_from_host_behind({work}, there), GpuUnavailableError);
  EXPECT_THROW(device->try_allocate(kPage), GpuUnavailableError);
  EXPECT_THROW(device->host_tier_device()->try_allocate(kPage), GpuUnavailableError);
  EXPECT_THROW(static_cast<void>(device->memory_info()), GpuUnavailableError);
  EXPECT_EQ(device->launched_work(stream.get()), nullptr);
  EXPECT_EQ(device->launched_work(nullptr), nullptr);
  EXPECT_TRUE(work->is_over()) << "nothing runs there any more";
  EXPECT_EQ(fake_cuda::counts().calls, calls) << "it is not asked again";
}

TEST_F(CudaDeviceFailureTest, AnErrorOfNoKnownKindKillsTheDeviceIfTheGpuDoesNotAnswerAfterIt) {
  ASSERT_FALSE(cuda::leaves_gpu_unusable(cudaErrorUnknown));
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  fake_cuda::break_gpu(cudaErrorUnknown);
  const std::vector<std::byte> content(kPage);
  EXPECT_THROW(device->copy_from_host(std::vector<CopyRun>{{content.data(), arena.begin(), kPage}}),
               GpuUnavailableError);
}

TEST_F(CudaDeviceFailureTest, AKernelThatBreaksTheGpuEndsTheWaitForIt) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  fake::Gate gate;
  gate.close();
  stream.launch([&] {
    gate.pass();
    fake_cuda::break_gpu(cudaErrorIllegalAddress);
  });
  const PageUses work{device->launched_work(stream.get())};
  std::thread writer([&] {
    const std::vector<std::byte> content(kPage);
    EXPECT_THROW(device->copy_from_host_behind(
                     work, std::vector<CopyRun>{{content.data(), arena.begin(), kPage}}),
                 GpuUnavailableError);
  });
  EXPECT_TRUE(becomes_true([] { return fake_cuda::counts().copied_runs == 1; }));
  gate.open();
  writer.join();
  EXPECT_TRUE(work.front()->is_over());
}

// Otherwise the copy could write pages that have been given to somebody else.
TEST_F(CudaDeviceFailureTest, ACopyThatFailsReturnsOnlyWhenNothingOfItIsUnderWay) {
  const auto device = make_cuda_device();
  const Arena arena(device, 2 * kPage);
  const std::vector<std::byte> content = pattern(2 * kPage, 1);
  device->copy_from_host(std::vector<CopyRun>{{content.data(), arena.begin(), kPage}});
  const std::size_t begun = fake_cuda::counts().calls;
  device->copy_from_host(std::vector<CopyRun>{{content.data(), arena.begin(), kPage}});
  const std::size_t calls = fake_cuda::counts().calls - begun;
  // The wait for it fails. Then the GPU is asked whether it answers, and the stream is waited for.
  const std::size_t calls_then = begun + 2 * calls + 2;
  fake_cuda::fail_call_after(static_cast<long>(calls) - 1, cudaErrorInvalidValue);
  fake_cuda::copies().close();
  std::atomic<bool> returned{false};
  std::thread writer([&] {
    EXPECT_THROW(
        device->copy_from_host(std::vector<CopyRun>{{content.data(), arena.begin(), kPage}}),
        GpuCallError);
    returned = true;
  });
  EXPECT_TRUE(becomes_true([&] { return returned || fake_cuda::counts().calls == calls_then; }));
  EXPECT_TRUE(fake_cuda::has_failed());
  EXPECT_FALSE(returned);
  fake_cuda::copies().open();
  writer.join();
}

// Then nobody knows what is still read or written.
TEST_F(CudaDeviceFailureTest, AWaitForTheGpuThatFailsKillsTheDevice) {
  const auto device = make_cuda_device();
  fake_cuda::fail_call_after(1, cudaErrorInvalidValue);  // after the question which GPU is current
  EXPECT_EQ(device->launched_work(nullptr), nullptr);
  EXPECT_TRUE(fake_cuda::has_failed());
  EXPECT_THROW(static_cast<void>(device->memory_info()), GpuUnavailableError);
}

TEST_F(CudaDeviceFailureTest, AFailedCopyWhoseEndCannotBeFoundOutKillsTheDevice) {
  struct ForeignUse final : PageUse {
    bool is_over() const override { return false; }
  };
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const std::vector<std::byte> content(kPage);
  const std::vector<CopyRun> runs{{content.data(), arena.begin(), kPage}};
  const PageUses foreign{std::make_shared<ForeignUse>()};
  device->copy_from_host(runs);
  EXPECT_THROW(device->copy_from_host_behind(foreign, runs), std::bad_cast);
  device->copy_from_host(runs);
  fake_cuda::fail_call_after(1, cudaErrorInvalidValue);  // after the question which GPU is current
  EXPECT_THROW(device->copy_from_host_behind(foreign, runs), std::bad_cast);
  EXPECT_TRUE(fake_cuda::has_failed());
  EXPECT_THROW(device->copy_from_host(runs), GpuUnavailableError);
}

TEST_F(CudaDeviceFailureTest, ALeaseEndsAlsoWithoutAnEvent) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  for (const long call : {1, 2}) {  // to ask for a capture, to make the event
    fake_cuda::fail_call_after(call, cudaErrorMemoryAllocation);
    EXPECT_EQ(device->launched_work(stream.get()), nullptr);
    EXPECT_TRUE(fake_cuda::has_failed());
    EXPECT_EQ(fake_cuda::counts().device_synchronisations, call) << "waited for instead";
  }
}

TEST_F(CudaDeviceFailureTest, AtTheEndOfTheProcessEverythingIsQuiet) {
  auto device = make_cuda_device();
  auto host = device->host_tier_device();
  std::byte* on_host = host->try_allocate(kPage);
  std::byte* on_gpu = device->try_allocate(kPage);
  const ComputeStream stream;
  auto work = device->launched_work(stream.get());
  const std::vector<std::byte> content(kPage);
  device->copy_from_host(std::vector<CopyRun>{{content.data(), on_gpu, kPage}});
  fake_cuda::unload();
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(work->is_over());
  work.reset();
  device->deallocate(on_gpu, kPage);
  host->deallocate(on_host, kPage);
  host.reset();
  device.reset();
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(CudaDeviceFailureTest, AnotherThreadsCaptureIsWaitedForAndKillsNothing) {
  const auto device = make_cuda_device();
  long call = 0;
  for (; call < 20; ++call) {
    fake_cuda::fail_call_after(call, cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(device->launched_work(nullptr), nullptr);
    if (!fake_cuda::has_failed()) {
      break;
    }
  }
  EXPECT_GT(call, 0) << "no wait met a capture";
  fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
  EXPECT_GT(device->memory_info().total_bytes, 0U) << "the device is alive";
}

}  // namespace
}  // namespace pagedlora
