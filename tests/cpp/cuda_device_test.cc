// What CudaDevice does with streams, events and memory (design 3.4: L2), beside the contract of
// every device.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_fixture.h"
#include "device_contract.h"
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

class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaDeviceTest() { fake_cuda::reset(); }

  static void write(Device& device, std::byte* to, const std::vector<std::byte>& content) {
    device.copy_from_host(std::vector<CopyRun>{{content.data(), to, content.size()}});
  }
  static std::vector<std::byte> read(Device& device, const std::byte* from,
                                     std::size_t bytes = kPage) {
    std::vector<std::byte> content(bytes);
    device.copy_to_host(std::vector<CopyRun>{{from, content.data(), bytes}});
    return content;
  }
  // Pages of 4096 bytes that do not lie side by side.
  static std::vector<CopyRun> scattered(const std::byte* from, std::byte* to, std::size_t pages) {
    std::vector<CopyRun> runs;
    for (std::size_t i = 0; i < pages; ++i) {
      runs.push_back({from + i * kPage, to + (pages - 1 - i) * kPage, kPage});
    }
    return runs;
  }
  static int current_gpu() {
    int gpu = -1;
    EXPECT_EQ(cudaGetDevice(&gpu), cudaSuccess);
    return gpu;
  }
};

TEST_F(CudaDeviceTest, L2_WorkOnAStreamIsOverWhenTheStreamIsThrough) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  HeldRead kernel(stream, arena.begin(), kPage);
  const auto work = device->launched_work(stream.get());
  ASSERT_NE(work, nullptr);
  EXPECT_FALSE(work->is_over());
  EXPECT_TRUE(device->can_queue_behind(*work));
  kernel.gate.open();
  EXPECT_TRUE(becomes_true([&] { return work->is_over(); }));
  EXPECT_TRUE(kernel.is_over());
}

TEST_F(CudaDeviceTest, L2_WhatIsLaunchedLaterIsNotPartOfIt) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  HeldRead before(stream, arena.begin(), kPage);
  const auto work = device->launched_work(stream.get());
  const HeldRead after(stream, arena.begin(), kPage);
  before.gate.open();
  EXPECT_TRUE(becomes_true([&] { return work->is_over(); }));
  EXPECT_FALSE(after.is_over());
}

TEST_F(CudaDeviceTest, L2_WithoutAStreamTheWholeGpuIsWaitedFor) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  HeldRead kernel(stream, arena.begin(), kPage);
  std::atomic<bool> returned{false};
  std::thread helper([&] {
    becomes_true([&] { return returned || fake_cuda::counts().device_synchronisations == 1; });
    kernel.gate.open();
  });
  EXPECT_EQ(device->launched_work(nullptr), nullptr);
  EXPECT_TRUE(kernel.is_over());
  returned = true;
  helper.join();
}

TEST_F(CudaDeviceTest, L2_ACopyBehindWorkLetsItReadWhatWasThere) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const std::vector<std::byte> before = pattern(kPage, 1);
  const std::vector<std::byte> after = pattern(kPage, 2);
  write(*device, arena.begin(), before);
  const ComputeStream stream;
  HeldRead kernel(stream, arena.begin(), kPage);
  const PageUses work{device->launched_work(stream.get())};
  std::atomic<bool> written{false};
  std::thread writer([&] {
    device->copy_from_host_behind(work, std::vector<CopyRun>{{after.data(), arena.begin(), kPage}});
    written = true;
  });
  EXPECT_TRUE(becomes_true([&] { return written || fake_cuda::counts().copied_runs == 2; }));
  EXPECT_FALSE(written);
  EXPECT_EQ(kernel.content(), before);
  writer.join();
  EXPECT_EQ(read(*device, arena.begin()), after);
  EXPECT_EQ(fake_cuda::counts().stream_waits, 1U);
}

TEST_F(CudaDeviceTest, WhatIsKnownToBeOverIsNotWaitedFor) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  const auto work = device->launched_work(stream.get());
  ASSERT_TRUE(becomes_true([&] { return work->is_over(); }));
  const std::vector<std::byte> content = pattern(kPage, 1);
  device->copy_from_host_behind({work},
                                std::vector<CopyRun>{{content.data(), arena.begin(), kPage}});
  EXPECT_EQ(fake_cuda::counts().stream_waits, 0U);
  EXPECT_EQ(read(*device, arena.begin()), content);
}

TEST_F(CudaDeviceTest, EventsAreUsedAgain) {
  const auto device = make_cuda_device();
  const ComputeStream stream;
  for (int round = 0; round < 10; ++round) {
    EXPECT_NE(device->launched_work(stream.get()), nullptr);
  }
  EXPECT_EQ(fake_cuda::live().events, 1U);
}

TEST_F(CudaDeviceTest, L2_AStreamThatIsBeingCapturedIsRefusedAndLeftAlone) {
  const auto device = make_cuda_device();
  const ComputeStream stream;
  fake_cuda::begin_capture(stream.handle());
  const auto error = thrown_by<InvalidArgumentError>([&] { device->launched_work(stream.get()); });
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(std::string(error->what()).find("captured"), std::string::npos) << error->what();
  EXPECT_EQ(fake_cuda::counts().device_synchronisations, 0U);
  fake_cuda::end_capture(stream.handle());
  EXPECT_NE(device->launched_work(stream.get()), nullptr);
}

TEST_F(CudaDeviceTest, L2_TheLegacyStreamIsRefusedWhileAStreamThatItWaitsForIsCaptured) {
  const auto device = make_cuda_device();
  fake_cuda::fail_call_after(1, cudaErrorStreamCaptureImplicit);  // the question
  EXPECT_THROW(device->launched_work(cudaStreamLegacy), InvalidArgumentError);
  EXPECT_TRUE(fake_cuda::has_failed());
  EXPECT_NE(device->launched_work(cudaStreamLegacy), nullptr);
}

TEST_F(CudaDeviceTest, WorkOfAnotherGpuIsNotQueuedBehind) {
  fake_cuda::set_num_gpus(2);
  const auto first = make_cuda_device({.ordinal = 0});
  const auto second = make_cuda_device({.ordinal = 1});
  const ComputeStream stream;
  const auto work = first->launched_work(stream.get());
  EXPECT_TRUE(first->can_queue_behind(*work));
  EXPECT_FALSE(second->can_queue_behind(*work));
}

TEST_F(CudaDeviceTest, CopiesAtTheSameTimeHaveAStreamEachAndLaterOnesUseThemAgain) {
  const auto device = make_cuda_device();
  const Arena arena(device, 3 * kPage);
  const std::vector<std::byte> content = pattern(kPage, 1);
  fake_cuda::copies().close();
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] { write(*device, arena.begin() + i * kPage, content); });
  }
  EXPECT_TRUE(becomes_true([] { return fake_cuda::copies().num_waiting() == 3; }));
  EXPECT_EQ(fake_cuda::live().streams, 3U);
  fake_cuda::copies().open();
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read(*device, arena.begin() + i * kPage), content);
  }
  EXPECT_EQ(fake_cuda::live().streams, 3U);
}

TEST_F(CudaDeviceTest, ManyRunsAreOneCallAndFewAreNot) {
  const auto device = make_cuda_device();
  const Arena arena(device, 16 * kPage);
  const std::vector<std::byte> content = pattern(16 * kPage, 1);
  device->copy_from_host(scattered(content.data(), arena.begin(), 16));
  EXPECT_EQ(fake_cuda::counts().batches, 1U);
  EXPECT_EQ(fake_cuda::counts().single_copies, 0U);
  device->copy_from_host(scattered(content.data(), arena.begin(), 2));
  EXPECT_EQ(fake_cuda::counts().batches, 1U);
  EXPECT_EQ(fake_cuda::counts().single_copies, 2U);
}

TEST_F(CudaDeviceTest, ADriverWithoutBatchesIsAskedOnce) {
  fake_cuda::refuse_batches(cudaErrorCallRequiresNewerDriver);
  const auto device = make_cuda_device();
  const Arena arena(device, 16 * kPage);
  const std::vector<std::byte> content = pattern(16 * kPage, 1);
  device->copy_from_host(scattered(content.data(), arena.begin(), 16));
  fake_cuda::refuse_batches(cudaSuccess);
  device->copy_from_host(scattered(content.data(), arena.begin(), 16));
  EXPECT_EQ(fake_cuda::counts().batches, 0U);
  EXPECT_EQ(fake_cuda::counts().single_copies, 32U);
}

TEST_F(CudaDeviceTest, AShortCopyThatIsSoonOverIsNotSleptFor) {
  fake_cuda::answer_polls_late();
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const std::vector<std::byte> content = pattern(kPage, 1);
  write(*device, arena.begin(), content);
  EXPECT_EQ(read(*device, arena.begin()), content);
  EXPECT_EQ(fake_cuda::counts().event_waits, 0U);
}

TEST_F(CudaDeviceTest, AShortCopyThatTakesLongIsSleptFor) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const std::vector<std::byte> content = pattern(kPage, 1);
  fake_cuda::copies().close();
  std::thread writer([&] { write(*device, arena.begin(), content); });
  EXPECT_TRUE(becomes_true([] { return fake_cuda::counts().event_waits == 1; }));
  EXPECT_GT(fake_cuda::counts().polls, 0U);
  fake_cuda::copies().open();
  writer.join();
  EXPECT_EQ(read(*device, arena.begin()), content);
}

TEST_F(CudaDeviceTest, ALongCopyIsNotPolledFor) {
  constexpr std::size_t kBytes = std::size_t{16} << 20U;
  const auto device = make_cuda_device();
  const Arena arena(device, kBytes);
  const std::vector<std::byte> content(kBytes);
  write(*device, arena.begin(), content);
  EXPECT_EQ(fake_cuda::counts().polls, 0U);
  EXPECT_EQ(fake_cuda::counts().event_waits, 1U);
}

TEST_F(CudaDeviceTest, FreeMemoryIsWhatArenasLeave) {
  fake_cuda::set_memory(1U << 20U);
  const auto device = make_cuda_device();
  EXPECT_EQ(device->memory_info().total_bytes, std::size_t{1} << 20U);
  const Arena arena(device, 600'000);
  EXPECT_LE(device->memory_info().free_bytes, (std::size_t{1} << 20U) - 600'000);
  EXPECT_EQ(device->try_allocate(600'000), nullptr);
}

TEST_F(CudaDeviceTest, NoMoreIsPinnedThanMayBe) {
  fake_cuda::set_memory(1U << 20U);
  const auto host = make_cuda_device()->host_tier_device();
  const Arena arena(host, 600'000);
  EXPECT_NE(arena.begin(), nullptr);
  EXPECT_EQ(host->try_allocate(600'000), nullptr);
}

TEST_F(CudaDeviceTest, WithoutAGpuItSaysWhatIsMissing) {
  fake_cuda::set_num_gpus(0);
  auto error = thrown_by<GpuUnavailableError>([] { make_cuda_device(); });
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(error->reason.find("nvidia-smi"), std::string::npos) << error->reason;
  fake_cuda::set_driver_version(0);
  error = thrown_by<GpuUnavailableError>([] { make_cuda_device(); });
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(error->reason.find("no NVIDIA driver"), std::string::npos) << error->reason;
}

TEST_F(CudaDeviceTest, AGpuThatIsNotThereIsNamedWithTheNumberOfThoseThatAre) {
  fake_cuda::set_num_gpus(2);
  for (const int ordinal : {-1, 2}) {
    const auto error =
        thrown_by<GpuUnavailableError>([&] { make_cuda_device({.ordinal = ordinal}); });
    ASSERT_TRUE(error.has_value());
    EXPECT_NE(error->reason.find("cuda:" + std::to_string(ordinal)), std::string::npos);
    EXPECT_NE(error->reason.find("are 2"), std::string::npos) << error->reason;
  }
}

TEST_F(CudaDeviceTest, TheCallersGpuStaysCurrentExceptWhereCopiesRun) {
  fake_cuda::set_num_gpus(2);
  const auto device = make_cuda_device({.ordinal = 1});
  EXPECT_EQ(device->name(), "cuda:1");
  const Arena arena(device, kPage);
  static_cast<void>(device->memory_info());
  device->launched_work(nullptr);
  EXPECT_EQ(current_gpu(), 0);
  std::thread([&] {
    write(*device, arena.begin(), pattern(kPage, 1));
    EXPECT_EQ(current_gpu(), 1);
  }).join();
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  const ComputeStream stream;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_NE(device->launched_work(stream.get()), nullptr);
  EXPECT_EQ(current_gpu(), 0);
}

// The runtime of the tests notes every question and wait that is not beside captures.
TEST_F(CudaDeviceTest, TheCallersModeOfCaptureIsLeftAsItIs) {
  const auto device = make_cuda_device();
  const Arena arena(device, kPage);
  const ComputeStream stream;
  write(*device, arena.begin(), pattern(kPage, 1));
  static_cast<void>(device->launched_work(stream.get())->is_over());
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
}

}  // namespace
}  // namespace pagedlora
