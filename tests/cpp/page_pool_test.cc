// Claims take the lowest free pages (design 3.1), all or nothing (C2).
#include "pagedlora/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "fake_device.h"
#include "pagedlora/errors.h"
#include "random_seeds.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::FakeDevice;
using testing_support::num_steps;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::thrown_by;

constexpr std::size_t kPageBytes = 64;

std::vector<std::uint32_t> claim(PagePool& pool, std::size_t count) {
  std::vector<PageId> pages(count);
  EXPECT_TRUE(pool.try_claim(pages));
  std::vector<std::uint32_t> ids;
  for (const PageId page : pages) {
    ids.push_back(page.value);
  }
  return ids;
}

void release(PagePool& pool, const std::vector<std::uint32_t>& ids) {
  std::vector<PageId> pages;
  for (const std::uint32_t id : ids) {
    pages.push_back(PageId{id});
  }
  pool.release(pages);
}

class PagePoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<PagePool> make(std::size_t num_pages) {
    return std::make_unique<PagePool>(device_, "test", num_pages, kPageBytes);
  }

  const std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
};

TEST_F(PagePoolTest, ClaimsTheLowestFreePagesInOrder) {
  const auto pool = make(10);
  using Ids = std::vector<std::uint32_t>;
  EXPECT_EQ(claim(*pool, 4), (Ids{0, 1, 2, 3}));
  release(*pool, {2, 0});
  EXPECT_EQ(claim(*pool, 3), (Ids{0, 2, 4}));
  EXPECT_EQ(pool->num_free(), 5U);
  EXPECT_FALSE(pool->is_free(PageId{4}));
  EXPECT_TRUE(pool->is_free(PageId{5}));
}

TEST_F(PagePoolTest, AClaimThatDoesNotFitChangesNothing_C2) {
  const auto pool = make(3);
  claim(*pool, 2);
  std::vector<PageId> two(2, PageId{77});
  EXPECT_FALSE(pool->try_claim(two));
  EXPECT_EQ(two, std::vector<PageId>(2, PageId{77}));
  EXPECT_EQ(pool->num_free(), 1U);
  EXPECT_TRUE(pool->is_free(PageId{2}));
  EXPECT_EQ(claim(*pool, 1).front(), 2U);
  EXPECT_FALSE(pool->try_claim(std::span(two).first(1)));
  EXPECT_TRUE(pool->try_claim({}));
}

TEST_F(PagePoolTest, APageThatIsNotClaimedCannotBeReleased) {
  const auto pool = make(3);
  claim(*pool, 2);
  EXPECT_THROW(release(*pool, {2}), std::logic_error);
  EXPECT_THROW(release(*pool, {3}), std::logic_error);
  EXPECT_THROW(release(*pool, {4'000'000'000}), std::logic_error);
  release(*pool, {1});
  EXPECT_THROW(release(*pool, {1}), std::logic_error);
  EXPECT_EQ(pool->num_free(), 2U);
}

// The bitmap has one level more for each factor of 64.
TEST_F(PagePoolTest, ClaimsAndReleasesAllPagesAtEveryNumberOfLevels) {
  for (const std::size_t num_pages : {1U, 63U, 64U, 65U, 4095U, 4096U, 4097U, 300'000U}) {
    SCOPED_TRACE(num_pages);
    const auto pool = make(num_pages);
    EXPECT_EQ(pool->num_free(), num_pages);
    const std::vector<std::uint32_t> all = claim(*pool, num_pages);
    for (std::uint32_t i = 0; i < num_pages; ++i) {
      ASSERT_EQ(all[i], i);
    }
    EXPECT_EQ(pool->num_free(), 0U);
    const auto last = static_cast<std::uint32_t>(num_pages - 1);
    release(*pool, {last});
    EXPECT_EQ(claim(*pool, 1).front(), last);
    release(*pool, all);
    EXPECT_EQ(claim(*pool, 1).front(), 0U);
  }
}

TEST_F(PagePoolTest, AgreesWithASetOfFreePagesThroughRandomUse) {
  for (const std::uint32_t seed : seeds(5)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    const auto pick = [&](std::size_t low, std::size_t high) {
      return std::uniform_int_distribution<std::size_t>(low, high)(rng);
    };
    const std::size_t num_pages = pick(1, 9000);
    const auto pool = make(num_pages);
    std::set<std::uint32_t> free;
    for (std::uint32_t i = 0; i < num_pages; ++i) {
      free.insert(free.end(), i);
    }
    std::vector<std::uint32_t> claimed;
    for (int step = 0; step < num_steps(3000); ++step) {
      if (pick(0, 1) == 0) {
        std::vector<PageId> pages(pick(0, 40));
        ASSERT_EQ(pool->try_claim(pages), pages.size() <= free.size());
        if (pages.size() <= free.size()) {
          for (const PageId page : pages) {
            ASSERT_EQ(page.value, *free.begin()) << "not the lowest free page";
            free.erase(free.begin());
            claimed.push_back(page.value);
          }
        }
      } else {
        for (std::size_t count = pick(0, 50); count > 0 && !claimed.empty(); --count) {
          std::swap(claimed[pick(0, claimed.size() - 1)], claimed.back());
          release(*pool, {claimed.back()});
          free.insert(claimed.back());
          claimed.pop_back();
        }
      }
      ASSERT_EQ(pool->num_free(), free.size());
    }
  }
}

TEST_F(PagePoolTest, ADeviceWithoutRoomIsOutOfMemory) {
  device_->refuse_allocations = true;
  const auto error = thrown_by<OutOfMemoryError>([&] { make(5); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->tier, "test");
  EXPECT_EQ(error->bytes, 5 * kPageBytes);
}

TEST_F(PagePoolTest, APoolWithoutPagesIsRefused) {
  EXPECT_THROW(make(0), InvalidArgumentError);
  EXPECT_THROW(make(std::size_t{1} << 32), InvalidArgumentError);
  EXPECT_EQ(device_->live_bytes, 0U);
}

TEST_F(PagePoolTest, GivesItsArenaBackAndCanBeClosedWhilePrefaulting) {
  constexpr std::size_t kBigPages = 1U << 20;  // 64 MiB: prefaulted on a thread
  const auto pool = make(kBigPages);
  EXPECT_EQ(device_->live_bytes, kBigPages * kPageBytes);
  EXPECT_EQ(pool->arena_bytes(), kBigPages * kPageBytes);
}

TEST_F(PagePoolTest, PrefaultsASmallArenaAtOnce) {
  const auto pool = make(100);
  EXPECT_EQ(device_->prefaulted_bytes, 100 * kPageBytes);
}

TEST(HostDeviceTest, ArenasAreAlignedAndWritableAndCopiesCopy) {
  const std::shared_ptr<Device> device = make_host_device();
  constexpr std::size_t kBytes = 10'000;
  std::byte* arena = device->try_allocate(kBytes);
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena) % 4096, 0U);
  device->prefault(arena, kBytes);
  std::vector<std::byte> data(kBytes / 2, std::byte{7});
  const CopyRun in[]{{data.data(), arena, 100}, {data.data(), arena + 5000, 200}};
  device->copy_from_host(in);
  std::vector<std::byte> back(kBytes);
  const CopyRun out[]{{arena, back.data(), kBytes}};
  device->copy_to_host(out);
  EXPECT_EQ(std::ranges::count(back, std::byte{7}), 300);
  EXPECT_EQ(back[5199], std::byte{7});
  device->deallocate(arena, kBytes);
  EXPECT_EQ(device->name(), "cpu");
  EXPECT_GT(device->memory_info().free_bytes, 0U);
  EXPECT_GE(device->memory_info().total_bytes, device->memory_info().free_bytes);
}

}  // namespace
}  // namespace pagedlora
