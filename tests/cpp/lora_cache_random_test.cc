// One tier beside a list that says what it should be, through random use.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "fake_device.h"
#include "pagedlora/lora_cache.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::FakeDevice;
using testing_support::num_steps;
using testing_support::seed_label;
using testing_support::seeds;

// What the cache should be, as a list; every entry with the time of its last use.
struct ModelEntry {
  std::size_t pages;
  bool is_loading;
  EvictionClass eviction_class;
  int pins;
  std::uint64_t used;
  std::uint64_t distance = 0;

  bool is_evictable() const { return pins == 0; }
};

class CacheModel {
 public:
  std::map<std::uint64_t, ModelEntry> entries;

  std::uint64_t now() { return ++clock_; }
  std::size_t free_pages(std::size_t total) const {
    for (const auto& [task, entry] : entries) {
      total -= entry.pages;
    }
    return total;
  }
  std::size_t evictable_pages() const {
    std::size_t pages = 0;
    for (const auto& [task, entry] : entries) {
      pages += entry.is_evictable() ? entry.pages : 0;
    }
    return pages;
  }
  std::uint64_t take_victim() {
    const auto order = [](const auto& item) {
      const ModelEntry& entry = item.second;
      const bool waits = entry.eviction_class == EvictionClass::waiting;
      return std::tuple(!entry.is_evictable(), entry.eviction_class,
                        waits ? ~entry.distance : entry.used, item.first);
    };
    const auto victim = std::ranges::min_element(entries, {}, order);
    const std::uint64_t task = victim->first;
    entries.erase(victim);
    return task;
  }
  void demote_all() {
    for (auto& [task, entry] : entries) {
      if (entry.is_evictable()) {
        entry.eviction_class = EvictionClass::unowned;
      }
    }
  }

 private:
  std::uint64_t clock_ = 0;
};

TEST(LoraCacheRandomTest, AgreesWithAListThroughRandomUse) {
  constexpr std::size_t kPages = 70;
  for (const std::uint32_t seed : seeds(6)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    LoraCache cache(std::make_shared<FakeDevice>(), "test", kPages, 64,
                    eviction_policy_factory("lru"));
    CacheModel model;
    for (int step = 0; step < num_steps(8000); ++step) {
      const TaskId task{rng() % 12};
      const auto found = model.entries.find(task.value);
      const auto eviction_class = static_cast<EvictionClass>(rng() % kNumEvictionClasses);
      const std::uint64_t distance = rng() % 20;
      if (found == model.entries.end()) {
        const std::size_t pages = 1 + rng() % 20;
        const std::size_t free = model.free_pages(kPages);
        const std::size_t evictable = model.evictable_pages();
        std::vector<TaskId> evicted;
        const auto shortage =
            cache.try_make_room(pages, [&](TaskId victim) { evicted.push_back(victim); });
        ASSERT_EQ(shortage.has_value(), pages > free + evictable);
        if (shortage) {
          ASSERT_EQ(shortage->free_pages, free);
          ASSERT_EQ(shortage->evictable_pages, evictable);
          ASSERT_TRUE(evicted.empty());
        } else {
          for (const TaskId victim : evicted) {
            ASSERT_LT(model.free_pages(kPages), pages) << "more was evicted than needed";
            ASSERT_EQ(model.take_victim(), victim.value);
          }
          const std::uint64_t use = model.now();
          cache.claim(task, pages, use);
          model.entries[task.value] = {pages, true, EvictionClass::unowned, 0, use};
        }
      } else if (ModelEntry& entry = found->second; entry.is_loading && rng() % 2 == 0) {
        if (rng() % 3 == 0) {
          cache.fail(task);
          model.entries.erase(found);
        } else {
          cache.publish(task);
          entry.is_loading = false;
        }
      } else if (const auto action = rng() % 8; action < 2) {
        cache.pin(task);
        ++entry.pins;
      } else if (action < 4 && entry.pins > 0) {
        cache.unpin(task);
        --entry.pins;
      } else if (action == 4) {
        entry.used = model.now();
        cache.use(task, entry.used);
      } else if (action == 5) {
        cache.set_class(task, eviction_class, distance);
        entry.eviction_class = eviction_class;
        entry.distance = distance;
      } else if (action == 6 && entry.is_evictable()) {
        cache.evict(task);
        model.entries.erase(found);
      } else if (action == 7 && rng() % 4 == 0) {
        cache.demote_all();
        model.demote_all();
      }
      ASSERT_NO_THROW(cache.check_invariants());
      ASSERT_EQ(cache.entries().size(), model.entries.size());
      ASSERT_EQ(cache.pool().num_free(), model.free_pages(kPages));
      ASSERT_EQ(cache.evictable_pages(), model.evictable_pages());
    }
  }
}

}  // namespace
}  // namespace pagedlora
