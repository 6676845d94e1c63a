// One tier: transitions, all-or-nothing room (C2), victims (C3, L3), pins, and its own checker.
#include "pagedlora/lora_cache.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake_device.h"

namespace pagedlora {
namespace {

using testing_support::FakeDevice;

constexpr TaskId kTask{1};

class LoraCacheTest : public ::testing::Test {
 protected:
  void TearDown() override { cache_.check_invariants(); }

  void add(std::uint64_t task, std::size_t pages,
           EvictionClass eviction_class = EvictionClass::unowned) {
    cache_.claim(TaskId{task}, pages, ++uses_);
    cache_.set_class(TaskId{task}, eviction_class);
    cache_.publish(TaskId{task});
  }

  // The victims of making that many pages free.
  std::vector<std::uint64_t> make_room(std::size_t pages) {
    std::vector<std::uint64_t> tasks;
    EXPECT_EQ(cache_.try_make_room(pages, [&](TaskId task) { tasks.push_back(task.value); }),
              std::nullopt);
    return tasks;
  }
  std::optional<Shortage> shortage_for(std::size_t pages) {
    return cache_.try_make_room(pages, [](TaskId task) { ADD_FAILURE() << task.value; });
  }

  static constexpr std::size_t kNumPages = 10;
  using Tasks = std::vector<std::uint64_t>;

  std::uint64_t uses_ = 0;

  LoraCache cache_{std::make_shared<FakeDevice>(), "test", kNumPages, 64,
                   eviction_policy_factory("lru")};
};

TEST_F(LoraCacheTest, AnEntryGoesFromAbsentToLoadingToResidentToAbsent) {
  EXPECT_EQ(cache_.find(kTask), nullptr);
  cache_.claim(kTask, 3, ++uses_);
  const LoraCache::Entry& entry = *cache_.find(kTask);
  EXPECT_EQ(entry.state, EntryState::loading);
  EXPECT_EQ(entry.pages, (std::vector{PageId{0}, PageId{1}, PageId{2}}));
  EXPECT_FALSE(cache_.is_resident(kTask));
  cache_.publish(kTask);
  EXPECT_TRUE(cache_.is_resident(kTask));
  cache_.evict(kTask);
  EXPECT_EQ(cache_.find(kTask), nullptr);
  EXPECT_EQ(cache_.pool().num_free(), kNumPages);
}

TEST_F(LoraCacheTest, TransitionsThatAreNotInTheTableAreRefusedInEveryState) {
  const auto apply = [&](EntryEvent event) {
    switch (event) {
      case EntryEvent::claim:
        cache_.claim(kTask, 2, ++uses_);
        break;
      case EntryEvent::publish:
        cache_.publish(kTask);
        break;
      case EntryEvent::fail:
        cache_.fail(kTask);
        break;
      case EntryEvent::cancel:
      case EntryEvent::evict:
        cache_.evict(kTask);
        break;
    }
  };
  const auto go_to = [&](EntryState state) {
    if (state != EntryState::absent) {
      cache_.claim(kTask, 2, ++uses_);
    }
    if (state == EntryState::resident) {
      cache_.publish(kTask);
    }
  };
  for (const EntryState state : {EntryState::absent, EntryState::loading, EntryState::resident}) {
    // evict() is the event that the state asks for, evict or cancel.
    const EntryEvent gone = state == EntryState::loading ? EntryEvent::cancel : EntryEvent::evict;
    for (const EntryEvent event :
         {EntryEvent::claim, EntryEvent::publish, EntryEvent::fail, gone}) {
      SCOPED_TRACE(std::string(entry_state_name(state)) + " + " +
                   std::string(entry_event_name(event)));
      go_to(state);
      const auto next = next_state(state, event);
      if (next) {
        EXPECT_NO_THROW(apply(event));
      } else {
        EXPECT_THROW(apply(event), std::logic_error);
      }
      const LoraCache::Entry* entry = cache_.find(kTask);
      EXPECT_EQ(entry == nullptr ? EntryState::absent : entry->state, next.value_or(state));
      cache_.check_invariants();
      if (entry != nullptr && entry->state == EntryState::loading) {
        cache_.fail(kTask);
      } else if (entry != nullptr) {
        cache_.evict(kTask);
      }
    }
  }
}

TEST_F(LoraCacheTest, C1_AFailedLoadFreesItsPages) {
  cache_.claim(kTask, 4, ++uses_);
  EXPECT_EQ(cache_.pool().num_free(), 6U);
  cache_.fail(kTask);
  EXPECT_EQ(cache_.pool().num_free(), kNumPages);
  EXPECT_EQ(cache_.find(kTask), nullptr);
  EXPECT_NO_THROW(cache_.claim(kTask, 4, ++uses_));
}

TEST_F(LoraCacheTest, C2_RoomThatCannotBeMadeChangesNothingAndSaysWhy) {
  add(1, 3);
  add(2, 4);
  cache_.pin(TaskId{2});
  const auto shortage = shortage_for(7);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->needed_pages, 7U);
  EXPECT_EQ(shortage->free_pages, 3U);
  EXPECT_EQ(shortage->evictable_pages, 3U);
  EXPECT_TRUE(cache_.is_resident(TaskId{1}));
  EXPECT_EQ(make_room(6), Tasks{1});  // the most that can be freed
  EXPECT_EQ(cache_.pool().num_free(), 6U);
}

TEST_F(LoraCacheTest, EvictsNoMoreThanNeeded) {
  for (std::uint64_t task = 0; task < 5; ++task) {
    add(task, 2);
  }
  EXPECT_EQ(make_room(0), Tasks{});
  EXPECT_EQ(make_room(3), (Tasks{0, 1}));
  EXPECT_EQ(make_room(4), Tasks{});
}

TEST_F(LoraCacheTest, C3_VictimsAreTheLeastRecentlyUsedOfTheirClass) {
  for (std::uint64_t task = 0; task < 5; ++task) {
    add(task, 2);
  }
  cache_.use(TaskId{0}, ++uses_);
  cache_.pin(TaskId{3});
  cache_.unpin(TaskId{3});  // no use: it takes its old place
  cache_.pin(TaskId{1});
  cache_.use(TaskId{1}, ++uses_);
  cache_.unpin(TaskId{1});
  EXPECT_EQ(make_room(10), (Tasks{2, 3, 4, 0, 1}));
}

TEST_F(LoraCacheTest, L3_ClassesAreGivenUpUnownedThenPausedThenActive) {
  add(0, 2, EvictionClass::active);
  add(1, 2, EvictionClass::paused);
  add(2, 2, EvictionClass::unowned);
  add(3, 2, EvictionClass::paused);
  add(4, 2, EvictionClass::unowned);
  EXPECT_EQ(make_room(10), (Tasks{2, 4, 1, 3, 0}));
}

TEST_F(LoraCacheTest, AChangeOfClassIsNoUse) {
  add(0, 2, EvictionClass::active);
  add(1, 2);
  add(2, 2);
  cache_.set_class(TaskId{0}, EvictionClass::unowned);  // used before those that are there
  cache_.set_class(TaskId{1}, EvictionClass::unowned);  // nothing
  EXPECT_EQ(make_room(10), (Tasks{0, 1, 2}));
}

TEST_F(LoraCacheTest, PinsProtectUntilTheLastIsGone) {
  add(1, 5);
  cache_.pin(kTask);
  cache_.pin(kTask);
  EXPECT_EQ(cache_.evictable_pages(), 0U);
  EXPECT_THROW(cache_.evict(kTask), std::logic_error);
  EXPECT_TRUE(shortage_for(6).has_value());
  cache_.unpin(kTask);
  EXPECT_TRUE(shortage_for(6).has_value());
  cache_.set_class(kTask, EvictionClass::paused);  // pinned: only remembered
  cache_.use(kTask, ++uses_);
  cache_.unpin(kTask);
  EXPECT_EQ(cache_.evictable_pages(), 5U);
  EXPECT_EQ(make_room(6), Tasks{1});
}

TEST_F(LoraCacheTest, C3_ALoadingEntryIsGivenUpLikeAResidentOneUnlessItIsPinned) {
  cache_.claim(kTask, 5, ++uses_);
  EXPECT_EQ(cache_.evictable_pages(), 5U);
  cache_.pin(kTask);  // the lease it is loaded for
  EXPECT_EQ(cache_.evictable_pages(), 0U);
  EXPECT_TRUE(shortage_for(6).has_value());
  cache_.publish(kTask);
  EXPECT_TRUE(shortage_for(6).has_value());
  cache_.unpin(kTask);
  add(2, 5);
  EXPECT_EQ(make_room(5), Tasks{1});
  cache_.claim(TaskId{3}, 5, ++uses_);
  EXPECT_EQ(make_room(10), (Tasks{2, 3}));
}

TEST_F(LoraCacheTest, L3_OfThoseThatWaitTheFarthestGoesFirst) {
  for (const std::uint64_t distance : {2U, 5U, 1U, 3U}) {
    add(distance, 2);
    cache_.set_class(TaskId{distance}, EvictionClass::waiting, distance);
  }
  add(9, 2, EvictionClass::paused);
  EXPECT_EQ(cache_.shortage_for_waiting(4, 2), std::nullopt);  // 5 and 3 may go
  const auto shortage = cache_.shortage_for_waiting(5, 2);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->evictable_pages, 4U);
  EXPECT_EQ(make_room(10), (Tasks{5, 3, 2, 1, 9}));
}

struct FakeUse final : PageUse {
  bool is_over() const override { return over; }
  bool over = false;
};

TEST_F(LoraCacheTest, L5_UsesStayWithThePagesUntilTheyAreOver) {
  const auto reading = std::make_shared<FakeUse>();
  add(1, 4);
  cache_.add_page_use(TaskId{1}, reading);
  cache_.evict(TaskId{1});
  EXPECT_EQ(cache_.claim(TaskId{2}, 2, ++uses_), PageUses{reading});
  cache_.fail(TaskId{2});  // it never waited
  EXPECT_EQ(cache_.claim(TaskId{3}, 10, ++uses_), PageUses{reading}) << "each use once";
  cache_.fail(TaskId{3});
  reading->over = true;
  EXPECT_EQ(cache_.claim(TaskId{4}, 10, ++uses_), PageUses{});
}

TEST_F(LoraCacheTest, UsesThatEndBeforeTheEvictionDelayNobody) {
  const auto reading = std::make_shared<FakeUse>();
  add(1, 4);
  cache_.add_page_use(TaskId{1}, reading);
  reading->over = true;
  cache_.evict(TaskId{1});
  EXPECT_EQ(cache_.claim(TaskId{2}, 4, ++uses_), PageUses{});
  EXPECT_THROW(cache_.add_page_use(TaskId{1}, reading), std::logic_error);
}

TEST_F(LoraCacheTest, PinsOfAbsentEntriesAndMissingPinsAreRefused) {
  EXPECT_THROW(cache_.pin(kTask), std::logic_error);
  EXPECT_THROW(cache_.unpin(kTask), std::logic_error);
  add(1, 1);
  EXPECT_THROW(cache_.unpin(kTask), std::logic_error);
}

TEST_F(LoraCacheTest, TouchAndSetClassIgnoreAbsentTasks) {
  cache_.use(kTask, ++uses_);
  cache_.set_class(kTask, EvictionClass::active);
  EXPECT_TRUE(cache_.entries().empty());
}

TEST_F(LoraCacheTest, AClaimWithoutRoomIsRefusedAndLeavesNothing) {
  add(1, 8);
  EXPECT_THROW(cache_.claim(TaskId{2}, 3, ++uses_), std::logic_error);
  EXPECT_EQ(cache_.find(TaskId{2}), nullptr);
  EXPECT_EQ(cache_.pool().num_free(), 2U);
}

TEST_F(LoraCacheTest, DemoteAllLeavesOnlyTheOrderOfUseAndSparesThePinned) {
  add(0, 2, EvictionClass::active);
  add(1, 2, EvictionClass::paused);
  add(2, 2, EvictionClass::active);
  add(3, 2, EvictionClass::active);
  cache_.pin(TaskId{2});
  cache_.demote_all();
  for (const std::uint64_t task : {0U, 1U, 3U}) {
    EXPECT_EQ(cache_.find(TaskId{task})->eviction_class, EvictionClass::unowned);
  }
  EXPECT_EQ(cache_.find(TaskId{2})->eviction_class, EvictionClass::active);
  add(4, 2, EvictionClass::unowned);
  EXPECT_EQ(make_room(8), (Tasks{0, 1, 3, 4}));
}

}  // namespace
}  // namespace pagedlora
