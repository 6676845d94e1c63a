#include "device_contract.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>

namespace pagedlora::testing_support {
namespace {

constexpr std::size_t kAlignment = 4096;
constexpr std::size_t kKibibyte = 1024;

bool is_aligned(const std::byte* arena) {
  return reinterpret_cast<std::uintptr_t>(arena) % kAlignment == 0;
}

}  // namespace

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> content(bytes);
  std::uint32_t state = seed * 2654435761U + 12345U;
  for (std::byte& byte : content) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  return content;
}

TEST_P(DeviceContractTest, HasANameAndSaysHowMuchMemoryThereIs) {
  EXPECT_FALSE(device_->name().empty());
  const MemoryInfo info = device_->memory_info();
  EXPECT_GT(info.free_bytes, 0U);
  EXPECT_LE(info.free_bytes, info.total_bytes);
}

TEST_P(DeviceContractTest, ArenasOfAnySizeAreAlignedAndDoNotOverlap) {
  std::vector<std::unique_ptr<Arena>> arenas;
  for (const std::size_t bytes : {1U, 511U, 4096U, 4097U, 100'000U, 3U << 20U}) {
    arenas.push_back(std::make_unique<Arena>(device_, bytes));
    ASSERT_NE(arenas.back()->begin(), nullptr) << bytes;
    EXPECT_TRUE(is_aligned(arenas.back()->begin())) << bytes;
    write(*arenas.back(), 0, pattern(bytes, static_cast<unsigned>(bytes)));
  }
  for (const std::unique_ptr<Arena>& arena : arenas) {
    EXPECT_EQ(read(*arena, 0, arena->bytes()),
              pattern(arena->bytes(), static_cast<unsigned>(arena->bytes())));
  }
}

TEST_P(DeviceContractTest, MemoryThatWasGivenBackCanBeHadAgain) {
  for (unsigned round = 0; round < 20; ++round) {
    const Arena arena(device_, 256 * kKibibyte);
    ASSERT_NE(arena.begin(), nullptr);
    write(arena, 0, pattern(arena.bytes(), round));
    EXPECT_EQ(read(arena, 0, arena.bytes()), pattern(arena.bytes(), round));
  }
}

TEST_P(DeviceContractTest, AnArenaThatThereIsNoRoomForIsNull) {
  GetParam().exhaust(*device_);
  EXPECT_EQ(device_->try_allocate(std::size_t{1} << 60U), nullptr);
}

TEST_P(DeviceContractTest, AfterARefusalTheDeviceGoesOn) {
  const Arena arena(device_, 64 * kKibibyte);
  GetParam().exhaust(*device_);
  ASSERT_EQ(device_->try_allocate(std::size_t{1} << 60U), nullptr);
  write(arena, 0, pattern(arena.bytes(), 1));
  EXPECT_EQ(read(arena, 0, arena.bytes()), pattern(arena.bytes(), 1));
}

TEST_P(DeviceContractTest, RunsOfAnySizeAndAddressArriveAndTouchNothingElse) {
  const Arena arena(device_, 64 * kKibibyte);
  const std::vector<std::byte> before = pattern(arena.bytes(), 1);
  const std::vector<std::byte> source = pattern(arena.bytes(), 2);
  for (const std::size_t bytes : {1U, 2U, 3U, 7U, 63U, 65U, 511U, 512U, 4095U, 20'001U}) {
    for (const std::size_t at : {0U, 1U, 5U, 512U, 4097U}) {
      write(arena, 0, before);
      write(arena, at, std::span(source).subspan(3, bytes));
      std::vector<std::byte> expected = before;
      std::copy_n(source.begin() + 3, bytes, expected.begin() + static_cast<std::ptrdiff_t>(at));
      ASSERT_EQ(read(arena, 0, arena.bytes()), expected) << bytes << " bytes at " << at;
      EXPECT_EQ(read(arena, at, bytes),
                std::vector<std::byte>(source.begin() + 3, source.begin() + 3 + bytes));
    }
  }
}

// Few and many: a device may have another way for many.
TEST_P(DeviceContractTest, RunsInAnyOrderAndNumberArriveBothWays) {
  constexpr std::size_t kPage = 1536;
  for (const std::size_t pages : {1U, 2U, 3U, 17U, 300U}) {
    const Arena arena(device_, pages * kPage);
    const std::vector<std::byte> source = pattern(pages * kPage, static_cast<unsigned>(pages));
    std::vector<std::size_t> order(pages);
    for (std::size_t i = 0; i < pages; ++i) {
      order[i] = i;
    }
    std::ranges::shuffle(order, std::mt19937(static_cast<unsigned>(pages)));
    std::vector<CopyRun> there;
    std::vector<CopyRun> back;
    std::vector<std::byte> content(pages * kPage);
    for (std::size_t i = 0; i < pages; ++i) {
      there.push_back({source.data() + i * kPage, arena.begin() + order[i] * kPage, kPage});
      back.push_back({arena.begin() + order[i] * kPage, content.data() + i * kPage, kPage});
    }
    device_->copy_from_host(there);
    std::ranges::reverse(back);
    device_->copy_to_host(back);
    EXPECT_EQ(content, source) << pages << " runs";
  }
}

TEST_P(DeviceContractTest, NoRunsAndEmptyRunsCopyNothing) {
  const Arena arena(device_, 4 * kKibibyte);
  const std::vector<std::byte> content = pattern(arena.bytes(), 3);
  write(arena, 0, content);
  device_->copy_from_host({});
  device_->copy_to_host({});
  const std::array<std::byte, 2> source{std::byte{1}, std::byte{2}};
  std::vector<CopyRun> runs(20, CopyRun{source.data(), arena.begin() + 100, 0});
  device_->copy_from_host(runs);
  EXPECT_EQ(read(arena, 0, arena.bytes()), content);
  runs[11].bytes = 2;  // among empty ones
  device_->copy_from_host(runs);
  EXPECT_EQ(read(arena, 100, 2), std::vector<std::byte>(source.begin(), source.end()));
}

TEST_P(DeviceContractTest, PrefaultingChangesNothing) {
  const Arena arena(device_, 1024 * kKibibyte);
  const std::vector<std::byte> content = pattern(arena.bytes(), 4);
  write(arena, 0, content);
  device_->prefault(arena.begin(), arena.bytes());
  device_->prefault(arena.begin() + 8192, 4096);
  EXPECT_EQ(read(arena, 0, arena.bytes()), content);
}

TEST_P(DeviceContractTest, ThreadsCopyDistinctRangesAtTheSameTime) {
  constexpr std::size_t kBytes = 40'000;
  constexpr unsigned kThreads = 4;
  const Arena arena(device_, kThreads * kBytes);
  std::atomic<unsigned> num_right{0};
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      bool right = true;
      for (unsigned round = 0; round < 10; ++round) {
        const std::vector<std::byte> content = pattern(kBytes, thread * 100 + round);
        write(arena, thread * kBytes, content);
        right = right && read(arena, thread * kBytes, kBytes) == content;
      }
      num_right += right ? 1U : 0U;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_right, kThreads);
}

TEST_P(DeviceContractTest, WithoutAnythingLaunchedNothingIsLeftRunning) {
  const std::shared_ptr<const PageUse> work = device_->launched_work(nullptr);
  EXPECT_TRUE(work == nullptr || work->is_over());
}

TEST_P(DeviceContractTest, TheDeviceOfTheHostTierIsMemoryThatTheCpuReadsAndWrites) {
  const std::shared_ptr<Device> host = device_->host_tier_device();
  ASSERT_NE(host, nullptr);
  EXPECT_TRUE(host->is_host_memory());
  const Arena on_host(host, 12'345);
  ASSERT_NE(on_host.begin(), nullptr);
  EXPECT_TRUE(is_aligned(on_host.begin()));
  const std::vector<std::byte> content = pattern(on_host.bytes(), 5);
  host->prefault(on_host.begin(), on_host.bytes());
  std::ranges::copy(content, on_host.begin());
  const Arena arena(device_, on_host.bytes());
  device_->copy_from_host(std::vector<CopyRun>{{on_host.begin(), arena.begin(), arena.bytes()}});
  std::memset(on_host.begin(), 0, on_host.bytes());
  device_->copy_to_host(std::vector<CopyRun>{{arena.begin(), on_host.begin(), arena.bytes()}});
  EXPECT_TRUE(std::ranges::equal(std::span(on_host.begin(), on_host.bytes()), content));
}

TEST_P(DeviceContractTest, OnlyWhatItSaysSoItselfIsQueuedBehind) {
  struct ForeignUse final : PageUse {
    bool is_over() const override { return true; }
  };
  EXPECT_FALSE(device_->can_queue_behind(ForeignUse()));
  const Arena arena(device_, 4096);
  const std::vector<std::byte> content = pattern(4096, 6);
  device_->copy_from_host_behind({}, std::vector<CopyRun>{{content.data(), arena.begin(), 4096}});
  EXPECT_EQ(read(arena, 0, 4096), content);
}

TEST_P(DeviceContractTest, CpuMemoryIsWrittenByTheCpu) {
  if (!device_->is_host_memory()) {
    return;  // nothing is promised
  }
  const Arena arena(device_, 4096);
  const std::vector<std::byte> content = pattern(4096, 7);
  std::ranges::copy(content, arena.begin());
  EXPECT_EQ(read(arena, 0, 4096), content);
}

}  // namespace pagedlora::testing_support
