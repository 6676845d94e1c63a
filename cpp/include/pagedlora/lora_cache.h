// One tier: which tasks are in it, in which state, on which pages, and whom to evict.
//
// States and transitions are those of entry_state.h. Beside its state an entry has
//   pins   reasons why it must not be evicted: owners in the host tier, leases in the device tier
//   class  how soon it is given up when it has no pin; decided by the owner sets
//
// Invariants (check_invariants)
//   every page is free or in exactly one entry, and a claimed page is not free in the pool
//   an entry exists only while loading or resident; absent entries are not stored
//   the policy of a class holds exactly the resident entries of that class without pins
//   evictable_pages() is the sum of their pages
//
// Eviction is all or nothing: try_make_room first finds out whether enough can be freed.
//
// Thread-compatible: the caller holds the manager's lock. Addresses of entries are stable until
// they are evicted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pagedlora/entry_state.h"
#include "pagedlora/eviction_policy.h"
#include "pagedlora/ids.h"
#include "pagedlora/page_pool.h"

namespace pagedlora {

// In the order in which entries are given up.
enum class EvictionClass : std::uint8_t { unowned, paused, active };
inline constexpr std::size_t kNumEvictionClasses = 3;

// Why a claim cannot succeed now.
struct Shortage {
  std::size_t needed_pages = 0;
  std::size_t free_pages = 0;
  std::size_t evictable_pages = 0;
};

class LoraCache {
 public:
  struct Entry {
    EntryState state = EntryState::absent;
    EvictionClass eviction_class = EvictionClass::unowned;
    std::uint32_t pins = 0;
    std::vector<PageId> pages;
    PolicyNode node;
  };

  LoraCache(std::shared_ptr<Device> device, std::string tier, std::size_t num_pages,
            std::size_t page_bytes, const PolicyFactory& make_policy);

  // nullptr: absent. The entry may be loading.
  const Entry* find(TaskId task) const;
  bool is_resident(TaskId task) const;

  // Why room for `pages` cannot be made while `kept_pages` of the evictable ones must stay; nothing
  // if it can.
  std::optional<Shortage> shortage(std::size_t pages, std::size_t kept_pages = 0) const;

  [[noreturn]] void refuse(const Shortage& shortage) const;  // throws LoraCacheFullError

  // Evicts until `pages` are free and appends the victims to `evicted`; or changes nothing and says
  // why not.
  std::optional<Shortage> try_make_room(std::size_t pages, std::vector<TaskId>& evicted);

  // absent -> loading, on the lowest free pages. There must be room (std::logic_error).
  const Entry& claim(TaskId task, std::size_t pages, std::uint64_t use);
  void publish(TaskId task);  // loading -> resident
  void fail(TaskId task);     // loading -> absent; the pages are free again
  void evict(TaskId task);    // resident and unpinned -> absent

  void pin(TaskId task);  // loading or resident
  void unpin(TaskId task);
  void use(TaskId task, std::uint64_t use);  // numbered in call order; absent tasks are ignored
  void set_class(TaskId task, EvictionClass eviction_class);  // absent tasks are ignored

  // Every unpinned resident entry becomes `unowned`, keeping the order of victims.
  void demote_all();

  const PagePool& pool() const { return pool_; }
  const std::string& tier() const { return tier_; }
  std::size_t evictable_pages() const { return evictable_pages_; }
  const std::unordered_map<TaskId, Entry>& entries() const { return entries_; }

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

 private:
  Entry& require(TaskId task, EntryEvent event);
  static bool is_evictable(const Entry& entry);
  void enter_policy(Entry& entry);
  void leave_policy(Entry& entry);
  void remove(TaskId task);
  void check_entry(TaskId task, const Entry& entry, std::vector<bool>& owned) const;
  void check_policies() const;
  PolicyNode* next_victim();

  std::string tier_;
  PagePool pool_;
  std::unordered_map<TaskId, Entry> entries_;
  std::array<std::unique_ptr<EvictionPolicy>, kNumEvictionClasses> policies_;
  std::size_t evictable_pages_ = 0;
};

}  // namespace pagedlora
