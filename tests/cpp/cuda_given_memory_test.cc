// Memory of a GPU that somebody else allocated: what of a tensor is taken by DLPack, what is refused,
// and that arenas and the device tier lie in it.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_cache_fixture.h"
#include "device_contract.h"
#include "pagedlora/cuda/cuda_device.h"
#include "pagedlora/cuda/dlpack_memory.h"
#include "pagedlora/errors.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using cuda::GpuMemory;
using cuda::make_cuda_device;
using cuda::dlpack::kCudaDevice;
using cuda::dlpack::kIsReadOnly;
using cuda::dlpack::ManagedTensor;
using cuda::dlpack::memory_of;
using cuda::dlpack::Tensor;
using cuda::dlpack::VersionedTensor;
using testing_support::Arena;
using testing_support::becomes_true;
using testing_support::ComputeStream;
using testing_support::CudaCacheTest;
using testing_support::HeldRead;
using testing_support::kPage;
using testing_support::pattern;
using testing_support::thrown_by;

std::array<std::byte, 64> some_bytes;

class CudaGivenMemoryTest : public ::testing::Test {
 protected:
  CudaGivenMemoryTest() { fake_cuda::reset(); }
};

// float32 on cuda:1; sizes and strides live as long as it.
struct Given {
  explicit Given(std::vector<std::int64_t> sizes, std::vector<std::int64_t> steps = {})
      : shape(std::move(sizes)), strides(std::move(steps)) {
    tensor = {some_bytes.data(),
              {kCudaDevice, 1},
              static_cast<std::int32_t>(shape.size()),
              {2, 32, 1},
              shape.data(),
              strides.empty() ? nullptr : strides.data(),
              0};
  }

  // What is wrong with it; empty: nothing.
  std::string refusal() const {
    const auto error = thrown_by<InvalidArgumentError>([&] { memory_of(tensor, 1); });
    return error ? error->what() : "";
  }
  std::size_t bytes() const { return memory_of(tensor, 1).bytes; }

  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Tensor tensor{};
};

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(DlpackMemoryTest, ItIsTheTensorsBytesFromItsFirstElementOn) {
  Given given({2, 3});
  given.tensor.byte_offset = 8;
  const GpuMemory memory = memory_of(given.tensor, 1);
  EXPECT_EQ(memory.begin, some_bytes.data() + 8);
  EXPECT_EQ(memory.bytes, 24U);
  EXPECT_EQ(memory.owner, nullptr);
}

TEST(DlpackMemoryTest, ElementsOfAnyTypeAreCountedInBytes) {
  Given given({3});
  given.tensor.element = {2, 16, 4};
  EXPECT_EQ(given.bytes(), 24U) << "four lanes";
  given.tensor.element = {1, 8, 1};
  EXPECT_EQ(given.bytes(), 3U);
  given.tensor.element = {17, 4, 1};
  EXPECT_EQ(given.bytes(), 1U) << "whole bytes only";
  EXPECT_EQ(Given({}).bytes(), 4U) << "one number";
}

TEST(DlpackMemoryTest, RowAfterRowIsTakenAndNothingElse) {
  EXPECT_EQ(Given({2, 3}, {3, 1}).bytes(), 24U);
  EXPECT_EQ(Given({2, 1, 3}, {3, 99, 1}).bytes(), 24U) << "of one, the step does not matter";
  for (const std::vector<std::int64_t>& strides :
       std::vector<std::vector<std::int64_t>>{{4, 1}, {1, 2}, {-3, 1}, {0, 1}, {3, 2}}) {
    const std::string refusal = Given({2, 3}, strides).refusal();
    expect_in("(2, 3)", refusal);
    expect_in(std::to_string(strides[0]) + ", " + std::to_string(strides[1]), refusal);
    expect_in("contiguous", refusal);
  }
}

TEST(DlpackMemoryTest, AnotherDeviceIsNamed) {
  Given given({2});
  given.tensor.device = {kCudaDevice, 0};
  expect_in("lies on cuda:0, the device is cuda:1", given.refusal());
  given.tensor.device = {cuda::dlpack::kCpuDevice, 1};
  expect_in("the CPU", given.refusal());
  given.tensor.device = {13, 1};  // managed memory
  expect_in("type 13", given.refusal());
}

TEST(DlpackMemoryTest, WhatHoldsNoByteIsRefused) {
  expect_in("without a byte", Given({2, 0}).refusal());
  expect_in("without a byte", Given({0}, {1}).refusal());
  Given nowhere({2});
  nowhere.tensor.data = nullptr;
  expect_in("without a byte", nowhere.refusal());
}

TEST(DlpackMemoryTest, SizesThatNoMemoryHasAreRefused) {
  expect_in("-1", Given({2, -1}).refusal());
  expect_in("no memory", Given({std::int64_t{1} << 40, std::int64_t{1} << 40}).refusal());
  Given broken({2});
  broken.tensor.shape = nullptr;
  expect_in("1 dimensions", broken.refusal());
  broken.tensor.num_dimensions = -1;
  expect_in("-1 dimensions", broken.refusal());
}

TEST(DlpackMemoryTest, OfAVersionedTensorTheVersionAndTheFlagsCount) {
  const Given given({2});
  VersionedTensor managed{{1, 7}, nullptr, nullptr, 0, given.tensor};
  EXPECT_EQ(memory_of(managed, 1).bytes, 8U);
  managed.flags = 2;  // a copy
  EXPECT_EQ(memory_of(managed, 1).bytes, 8U);
  managed.flags = kIsReadOnly | 2;
  auto error = thrown_by<InvalidArgumentError>([&] { memory_of(managed, 1); });
  ASSERT_TRUE(error.has_value());
  expect_in("only be read", error->what());
  managed = {{2, 0}, nullptr, nullptr, 0, given.tensor};
  error = thrown_by<InvalidArgumentError>([&] { memory_of(managed, 1); });
  ASSERT_TRUE(error.has_value());
  expect_in("2.0", error->what());
}

TEST_F(CudaGivenMemoryTest, ArenasMayLieInGivenMemoryOneAtATime) {
  void* given = nullptr;
  ASSERT_EQ(cudaMalloc(&given, 4 * kPage), cudaSuccess);
  {
    bool is_kept = true;
    std::shared_ptr<void> owner(given, [&](void*) { is_kept = false; });
    auto device = make_cuda_device({.memory = {given, 4 * kPage, std::move(owner)}});
    EXPECT_EQ(device->try_allocate(4 * kPage), nullptr) << "it does not begin at a page";
    {
      const Arena arena(device, 3 * kPage);
      ASSERT_NE(arena.begin(), nullptr);
      EXPECT_EQ(device->try_allocate(1), nullptr);
      const std::vector<std::byte> content = pattern(3 * kPage, 1);
      device->copy_from_host(std::vector<CopyRun>{{content.data(), arena.begin(), content.size()}});
      std::vector<std::byte> back(content.size());
      device->copy_to_host(std::vector<CopyRun>{{arena.begin(), back.data(), back.size()}});
      EXPECT_EQ(back, content);
    }
    EXPECT_NE(Arena(device, 3 * kPage).begin(), nullptr) << "given back";
    EXPECT_TRUE(is_kept);
    device.reset();
    EXPECT_FALSE(is_kept);
  }
  ASSERT_EQ(cudaFree(given), cudaSuccess);
}

TEST_F(CudaGivenMemoryTest, GivenMemoryIsGivenBackOnlyWhenNothingRunsOnIt) {
  void* given = nullptr;
  ASSERT_EQ(cudaMalloc(&given, 4 * kPage), cudaSuccess);
  const auto device = make_cuda_device({.memory = {given, 4 * kPage, nullptr}});
  const ComputeStream stream;
  std::byte* arena = device->try_allocate(kPage);
  HeldRead kernel(stream, arena, kPage);
  std::thread helper([&] {
    becomes_true([&] { return fake_cuda::counts().device_synchronisations == 2; });
    kernel.gate.open();
  });
  device->deallocate(arena, kPage);
  EXPECT_TRUE(kernel.is_over());
  helper.join();
  ASSERT_EQ(cudaFree(given), cudaSuccess);
}

TEST_F(CudaGivenMemoryTest, WhatStillWritesGivenMemoryIsWaitedFor) {
  void* given = nullptr;
  ASSERT_EQ(cudaMalloc(&given, 4 * kPage), cudaSuccess);
  const ComputeStream stream;
  HeldRead kernel(stream, static_cast<std::byte*>(given), kPage);
  std::thread helper([&] {
    becomes_true([&] { return fake_cuda::counts().device_synchronisations == 1; });
    kernel.gate.open();
  });
  const auto device = make_cuda_device({.memory = {given, 4 * kPage, nullptr}});
  EXPECT_TRUE(kernel.is_over());
  helper.join();
  ASSERT_EQ(cudaFree(given), cudaSuccess);
}

TEST_F(CudaGivenMemoryTest, FreeMemoryIsThatOfGivenMemory) {
  void* given = nullptr;
  ASSERT_EQ(cudaMalloc(&given, 4 * kPage), cudaSuccess);
  {
    const auto device = make_cuda_device({.memory = {given, 4 * kPage, nullptr}});
    const MemoryInfo info = device->memory_info();
    EXPECT_EQ(info.total_bytes, 4 * kPage);
    EXPECT_LT(info.free_bytes, 4 * kPage) << "it does not begin at a page";
    const Arena arena(device, info.free_bytes);
    EXPECT_NE(arena.begin(), nullptr);
    EXPECT_EQ(device->memory_info().free_bytes, 0U);
  }
  ASSERT_EQ(cudaFree(given), cudaSuccess);
}

TEST_F(CudaGivenMemoryTest, GivenMemoryMustBeThatOfTheGpu) {
  fake_cuda::set_num_gpus(2);
  void* of_first = nullptr;
  ASSERT_EQ(cudaMalloc(&of_first, kPage), cudaSuccess);
  std::vector<std::byte> of_cpu(kPage);
  EXPECT_THROW(make_cuda_device({.ordinal = 1, .memory = {of_first, kPage, nullptr}}),
               InvalidArgumentError);
  EXPECT_THROW(make_cuda_device({.memory = {of_cpu.data(), kPage, nullptr}}), InvalidArgumentError);
  ASSERT_EQ(cudaFree(of_first), cudaSuccess);
}

TEST_F(CudaCacheTest, TheDeviceTierLiesInMemoryThatWasHandedOverAndIsGivenBackOnce) {
  constexpr std::int64_t kBytes = 1 << 16;
  void* allocated = nullptr;
  ASSERT_EQ(cudaMalloc(&allocated, kBytes), cudaSuccess);
  int num_deleted = 0;
  const std::int64_t shape = kBytes;
  ManagedTensor managed{{allocated, {kCudaDevice, 0}, 1, {1, 8, 1}, &shape, nullptr, 0},
                        &num_deleted,
                        [](ManagedTensor* self) { ++*static_cast<int*>(self->context); }};
  GpuMemory memory = memory_of(managed, 0);
  memory.owner =
      std::shared_ptr<ManagedTensor>(&managed, [](ManagedTensor* self) { self->deleter(self); });
  const std::size_t allocations = fake_cuda::live().device_allocations;
  make_manager_over(make_cuda_device({.memory = std::move(memory)}), 8, 4);
  EXPECT_EQ(fake_cuda::live().device_allocations, allocations);
  add_new(1, 3);
  const auto lease = ensure({1});
  EXPECT_TRUE(gpu_holds(*lease, 1));
  const std::byte* begin = static_cast<const std::byte*>(allocated);
  const std::byte* first = lease->find(RequestId{1})->pages.base;
  EXPECT_GE(first, begin);
  EXPECT_LT(first, begin + kBytes);
  lease->close();
  EXPECT_EQ(num_deleted, 0);
  manager_.reset();
  EXPECT_EQ(num_deleted, 1);
  ASSERT_EQ(cudaFree(allocated), cudaSuccess);
}

}  // namespace
}  // namespace pagedlora
