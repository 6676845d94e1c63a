// One tier: which tasks are in it, in which state, on which pages, and whom to evict.
//
// States and transitions are those of entry_state.h. Beside its state an entry has
//   pins   reasons why it must stay: owners in the host tier, leases in the device tier
//   class  how soon it is given up when it has no pin; decided by the owner sets
//   uses   what reads or writes its pages and does not keep them from being given away: they stay
//          with the pages, and whoever writes them next waits for them (page_use.h)
//
// Invariants (check_invariants)
//   every page is free or in exactly one entry, and a claimed page is not free in the pool
//   an entry exists only while loading or resident; absent entries are not stored
//   the policy of a class holds exactly the entries of that class without pins
//   evictable_pages() is the sum of their pages
//
// An entry without pins can be given up whether it is resident or still loading. So who is given up
// follows from the calls, never from how far a copy has come. It is all or nothing: try_make_room
// first finds out whether enough can be freed.
//
// Thread-compatible: the caller holds the manager's lock. Addresses of entries are stable until
// they are given up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pagedlora/entry_state.h"
#include "pagedlora/eviction_policy.h"
#include "pagedlora/ids.h"
#include "pagedlora/page_pool.h"
#include "pagedlora/page_use.h"

namespace pagedlora {

// In the order in which entries are given up. Within `waiting` the farthest goes first
// (PolicyNode::distance), within the others the policy decides.
enum class EvictionClass : std::uint8_t { unowned, waiting, paused, active };
inline constexpr std::size_t kNumEvictionClasses = 4;

// Why a claim cannot succeed now.
struct Shortage {
  std::size_t needed_pages = 0;
  std::size_t free_pages = 0;
  std::size_t evictable_pages = 0;
};

class LoraCache {
  // Pages that their entry has lost, and what still goes on in them.
  struct Retired {
    std::vector<PageId> pages;
    PageUses uses;
  };

 public:
  // Among very many tasks a call costs what it touches: what adding a request and marking it done look
  // at comes first.
  struct Entry {
    std::vector<PageId> pages;
    EntryState state = EntryState::absent;
    EvictionClass eviction_class = EvictionClass::unowned;
    std::uint32_t pins = 0;
    PolicyNode node;
    PageUses uses;
    std::list<Retired> retirement = std::list<Retired>(1);  // what the entry will leave behind
  };

  // Called before an entry is given up for others: its writer, if any, must be told to stop, and
  // must be among its uses for as long as it may still write.
  using OnVictim = std::function<void(TaskId)>;

  LoraCache(std::shared_ptr<Device> device, std::string tier, std::size_t num_pages,
            std::size_t page_bytes, const PolicyFactory& make_policy);

  // nullptr: absent. The entry may be loading.
  const Entry* find(TaskId task) const;
  Entry* find(TaskId task) { return const_cast<Entry*>(std::as_const(*this).find(task)); }
  bool is_resident(TaskId task) const;

  // Why room for `pages` cannot be made while `kept_pages` of the evictable ones must stay; nothing
  // if it can.
  std::optional<Shortage> shortage(std::size_t pages, std::size_t kept_pages = 0) const;

  // The same when only unowned entries, and waiting ones farther than `distance`, may go.
  std::optional<Shortage> shortage_for_waiting(std::size_t pages, std::uint64_t distance) const;

  [[noreturn]] void refuse(const Shortage& shortage) const;  // throws LoraCacheFullError

  // Evicts until `pages` are free, or changes nothing and says why not.
  std::optional<Shortage> try_make_room(std::size_t pages, const OnVictim& on_victim);

  // absent -> loading, on the lowest free pages. There must be room (std::logic_error). Returns what
  // still goes on in the pages: to be waited for before they are written. The only transition that
  // needs memory: the others cannot fail.
  PageUses claim(TaskId task, std::size_t pages, std::uint64_t use);
  void publish(TaskId task);  // loading -> resident
  void fail(TaskId task);     // loading -> absent; the pages are free again
  void evict(TaskId task);    // unpinned and resident (evict) or loading (cancel) -> absent

  void pin(TaskId task);  // loading or resident
  void unpin(TaskId task);
  void use(TaskId task, std::uint64_t use);  // numbered in call order; absent tasks are ignored
  void add_page_use(TaskId task, std::shared_ptr<const PageUse> use);  // loading or resident

  // For those that must not fail: each holder of a pin may reserve one use, and add it before it
  // unpins.
  void reserve_page_use(TaskId task);
  void add_reserved_page_use(TaskId task, std::shared_ptr<const PageUse> use) noexcept;

  // `distance` counts in the class `waiting` only. Absent tasks are ignored.
  void set_class(TaskId task, EvictionClass eviction_class, std::uint64_t distance = 0);

  // The same for an entry that has been looked up.
  void pin(Entry& entry);
  void unpin(Entry& entry);
  void use(Entry& entry, std::uint64_t use);
  void set_class(Entry& entry, EvictionClass eviction_class, std::uint64_t distance = 0) {
    if (entry.eviction_class != eviction_class || entry.node.distance != distance) {
      change_class(entry, eviction_class, distance);
    }
  }

  // Every unpinned entry becomes `unowned`, keeping the order of victims.
  void demote_all();

  const PagePool& pool() const { return pool_; }
  const std::string& tier() const { return tier_; }
  std::size_t evictable_pages() const;
  const std::unordered_map<TaskId, Entry>& entries() const { return entries_; }

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

 private:
  Entry& require(TaskId task, EntryEvent event);
  static bool is_evictable(const Entry& entry);
  EvictionPolicy& policy_of(const Entry& entry);
  void change_class(Entry& entry, EvictionClass eviction_class, std::uint64_t distance);
  void enter_policy(Entry& entry);
  void leave_policy(Entry& entry);
  void remove(TaskId task);
  PageUses uses_of(const std::vector<PageId>& claimed);
  void check_entry(TaskId task, const Entry& entry, std::vector<bool>& owned) const;
  void check_policies() const;
  PolicyNode* next_victim();

  std::string tier_;
  PagePool pool_;
  std::unordered_map<TaskId, Entry> entries_;
  std::array<std::unique_ptr<EvictionPolicy>, kNumEvictionClasses> policies_;
  std::array<std::size_t, kNumEvictionClasses> evictable_pages_{};  // by class
  std::list<Retired> retired_;  // those whose uses have ended are dropped at the next claim
};

}  // namespace pagedlora
