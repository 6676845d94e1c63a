#include "pagedlora/lora_cache.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "pagedlora/errors.h"
#include "policies/ordered_policy.h"

namespace pagedlora {
namespace {

[[noreturn]] void broken(const std::string& tier, const std::string& what) {
  throw std::logic_error(tier + " tier: " + what);
}

std::string label(TaskId task) { return "task " + std::to_string(task.value); }

}  // namespace

LoraCache::LoraCache(std::shared_ptr<Device> device, std::string tier, std::size_t num_pages,
                     std::size_t page_bytes, const PolicyFactory& make_policy)
    : tier_(std::move(tier)), pool_(std::move(device), tier_, num_pages, page_bytes) {
  for (std::unique_ptr<EvictionPolicy>& policy : policies_) {
    policy = make_policy();
  }
  policies_[static_cast<std::size_t>(EvictionClass::waiting)] =
      std::make_unique<internal::FarthestFirstPolicy>();
}

const LoraCache::Entry* LoraCache::find(TaskId task) const {
  const auto found = entries_.find(task);
  return found == entries_.end() ? nullptr : &found->second;
}

bool LoraCache::is_resident(TaskId task) const {
  const Entry* entry = find(task);
  return entry != nullptr && entry->state == EntryState::resident;
}

LoraCache::Entry& LoraCache::require(TaskId task, EntryEvent event) {
  const auto found = entries_.find(task);
  const EntryState from = found == entries_.end() ? EntryState::absent : found->second.state;
  if (!next_state(from, event)) {
    broken(tier_, "cannot " + std::string(entry_event_name(event)) + " " + label(task) +
                      ", which is " + std::string(entry_state_name(from)));
  }
  return found->second;
}

bool LoraCache::is_evictable(const Entry& entry) { return entry.pins == 0; }

EvictionPolicy& LoraCache::policy_of(const Entry& entry) {
  return *policies_[static_cast<std::size_t>(entry.eviction_class)];
}

void LoraCache::enter_policy(Entry& entry) {
  if (is_evictable(entry)) {
    policy_of(entry).insert(entry.node);
    evictable_pages_[static_cast<std::size_t>(entry.eviction_class)] += entry.pages.size();
  }
}

void LoraCache::leave_policy(Entry& entry) {
  if (is_evictable(entry)) {
    policy_of(entry).erase(entry.node);
    evictable_pages_[static_cast<std::size_t>(entry.eviction_class)] -= entry.pages.size();
  }
}

std::size_t LoraCache::evictable_pages() const {
  return std::accumulate(evictable_pages_.begin(), evictable_pages_.end(), std::size_t{0});
}

PolicyNode* LoraCache::next_victim() {
  for (const std::unique_ptr<EvictionPolicy>& policy : policies_) {
    if (PolicyNode* node = policy->victim()) {
      return node;
    }
  }
  return nullptr;
}

std::optional<Shortage> LoraCache::shortage(std::size_t pages, std::size_t kept_pages) const {
  const std::size_t evictable = evictable_pages() - kept_pages;
  if (pages > pool_.num_free() + evictable) {
    return Shortage{pages, pool_.num_free(), evictable};
  }
  return std::nullopt;
}

void LoraCache::refuse(const Shortage& shortage) const {
  throw LoraCacheFullError(tier_, shortage.needed_pages, shortage.free_pages,
                           shortage.evictable_pages);
}

std::optional<Shortage> LoraCache::shortage_for_waiting(std::size_t pages,
                                                        std::uint64_t distance) const {
  std::size_t evictable = evictable_pages_[static_cast<std::size_t>(EvictionClass::unowned)];
  policies_[static_cast<std::size_t>(EvictionClass::waiting)]->visit([&](const PolicyNode& node) {
    evictable += node.distance > distance ? entries_.at(node.task).pages.size() : 0;
  });
  if (pages > pool_.num_free() + evictable) {
    return Shortage{pages, pool_.num_free(), evictable};
  }
  return std::nullopt;
}

std::optional<Shortage> LoraCache::try_make_room(std::size_t pages, const OnVictim& on_victim) {
  if (const std::optional<Shortage> missing = shortage(pages)) {
    return missing;
  }
  while (pool_.num_free() < pages) {
    const TaskId victim = next_victim()->task;
    on_victim(victim);
    evict(victim);
  }
  return std::nullopt;
}

PageUses LoraCache::claim(TaskId task, std::size_t pages, std::uint64_t use) {
  if (find(task) != nullptr) {
    require(task, EntryEvent::claim);
  }
  std::vector<PageId> claimed(pages);
  Entry& entry = entries_[task];
  if (!pool_.try_claim(claimed)) {
    entries_.erase(task);
    broken(tier_, "no room was made for " + label(task));
  }
  PageUses uses;
  try {
    uses = uses_of(claimed);
  } catch (...) {
    pool_.release(claimed);
    entries_.erase(task);
    throw;
  }
  entry.state = EntryState::loading;
  entry.pages = std::move(claimed);
  entry.node.task = task;
  policy_of(entry).record_use(entry.node, use);
  enter_policy(entry);
  return uses;
}

// They stay with the pages until they end: this claim may be given up before it has waited for
// them. Both lists of pages are in ascending order.
PageUses LoraCache::uses_of(const std::vector<PageId>& claimed) {
  std::erase_if(retired_, [](const Retired& old) {
    return std::ranges::all_of(old.uses, [](const auto& use) { return use->is_over(); });
  });
  PageUses uses;
  for (const Retired& old : retired_) {
    const bool is_claimed = std::ranges::any_of(
        old.pages, [&](PageId page) { return std::ranges::binary_search(claimed, page); });
    if (is_claimed) {
      uses.insert(uses.end(), old.uses.begin(), old.uses.end());
    }
  }
  return uses;
}

void LoraCache::publish(TaskId task) {
  require(task, EntryEvent::publish).state = EntryState::resident;
}

void LoraCache::fail(TaskId task) {
  leave_policy(require(task, EntryEvent::fail));
  remove(task);
}

void LoraCache::evict(TaskId task) {
  const Entry* found = find(task);
  const bool is_loading = found != nullptr && found->state == EntryState::loading;
  Entry& entry = require(task, is_loading ? EntryEvent::cancel : EntryEvent::evict);
  if (entry.pins != 0) {
    broken(tier_, label(task) + " is evicted with " + std::to_string(entry.pins) + " pins");
  }
  leave_policy(entry);
  remove(task);
}

void LoraCache::remove(TaskId task) {
  const auto found = entries_.find(task);
  Entry& entry = found->second;
  pool_.release(entry.pages);
  std::erase_if(entry.uses, [](const auto& use) { return use->is_over(); });
  if (!entry.uses.empty()) {
    entry.retirement.front() = {std::move(entry.pages), std::move(entry.uses)};
    retired_.splice(retired_.end(), entry.retirement);
  }
  entries_.erase(found);
}

void LoraCache::add_page_use(TaskId task, std::shared_ptr<const PageUse> use) {
  Entry* entry = find(task);
  if (entry == nullptr) {
    broken(tier_, label(task) + " is used while absent");
  }
  std::erase_if(entry->uses, [](const auto& old) { return old->is_over(); });
  entry->uses.reserve(entry->uses.size() + 1 + entry->pins);  // what is reserved stays free
  entry->uses.push_back(std::move(use));
}

void LoraCache::reserve_page_use(TaskId task) {
  Entry& entry = entries_.at(task);
  entry.uses.reserve(entry.uses.size() + entry.pins);
}

void LoraCache::add_reserved_page_use(TaskId task, std::shared_ptr<const PageUse> use) noexcept {
  PageUses& uses = entries_.find(task)->second.uses;
  std::erase_if(uses, [](const auto& old) { return old->is_over(); });
  uses.push_back(std::move(use));
}

void LoraCache::pin(TaskId task) {
  Entry* entry = find(task);
  if (entry == nullptr) {
    broken(tier_, label(task) + " is pinned while absent");
  }
  pin(*entry);
}

void LoraCache::pin(Entry& entry) {
  leave_policy(entry);
  ++entry.pins;
}

void LoraCache::unpin(TaskId task) {
  Entry* entry = find(task);
  if (entry == nullptr) {
    broken(tier_, label(task) + " is unpinned while absent");
  }
  unpin(*entry);
}

void LoraCache::unpin(Entry& entry) {
  if (entry.pins == 0) {
    broken(tier_, label(entry.node.task) + " is unpinned without a pin");
  }
  --entry.pins;
  enter_policy(entry);
}

void LoraCache::use(TaskId task, std::uint64_t use_number) {
  if (Entry* entry = find(task)) {
    use(*entry, use_number);
  }
}

void LoraCache::use(Entry& entry, std::uint64_t use_number) {
  leave_policy(entry);
  policy_of(entry).record_use(entry.node, use_number);
  enter_policy(entry);
}

void LoraCache::set_class(TaskId task, EvictionClass eviction_class, std::uint64_t distance) {
  if (Entry* entry = find(task)) {
    set_class(*entry, eviction_class, distance);
  }
}

void LoraCache::change_class(Entry& entry, EvictionClass eviction_class, std::uint64_t distance) {
  leave_policy(entry);
  entry.eviction_class = eviction_class;
  entry.node.distance = distance;
  enter_policy(entry);
}

void LoraCache::demote_all() {
  for (std::size_t from = 1; from < kNumEvictionClasses; ++from) {
    while (const PolicyNode* node = policies_[from]->victim()) {
      set_class(node->task, EvictionClass::unowned);
    }
  }
}

void LoraCache::check_invariants() const {
  std::vector<bool> owned(pool_.num_pages(), false);
  std::size_t num_owned = 0;
  std::size_t evictable = 0;
  for (const auto& [task, entry] : entries_) {
    check_entry(task, entry, owned);
    num_owned += entry.pages.size();
    evictable += is_evictable(entry) ? entry.pages.size() : 0;
  }
  check_policies();
  if (num_owned + pool_.num_free() != pool_.num_pages()) {
    broken(tier_,
           std::to_string(pool_.num_pages() - num_owned - pool_.num_free()) + " pages are lost");
  }
  if (evictable != evictable_pages()) {
    broken(tier_, "counts " + std::to_string(evictable_pages()) + " evictable pages, has " +
                      std::to_string(evictable));
  }
}

void LoraCache::check_entry(TaskId task, const Entry& entry, std::vector<bool>& owned) const {
  if (entry.state == EntryState::absent) {
    broken(tier_, label(task) + " is stored while absent");
  }
  for (const PageId page : entry.pages) {
    if (pool_.is_free(page) || owned[page.value]) {
      broken(tier_, "page " + std::to_string(page.value) + " of " + label(task) +
                        (pool_.is_free(page) ? " is free" : " has two owners"));
    }
    owned[page.value] = true;
  }
}

void LoraCache::check_policies() const {
  std::size_t num_inserted = 0;
  for (std::size_t position = 0; position < kNumEvictionClasses; ++position) {
    policies_[position]->visit([&](const PolicyNode& node) {
      const Entry* entry = find(node.task);
      if (entry == nullptr || &entry->node != &node || !is_evictable(*entry) ||
          static_cast<std::size_t>(entry->eviction_class) != position) {
        broken(tier_, label(node.task) + " is evictable but must not be, or in another class");
      }
      ++num_inserted;
    });
  }
  const auto num_evictable = static_cast<std::size_t>(
      std::ranges::count_if(entries_, [](const auto& item) { return is_evictable(item.second); }));
  if (num_inserted != num_evictable) {
    broken(tier_, std::to_string(num_evictable - num_inserted) + " entries cannot be evicted");
  }
}

}  // namespace pagedlora
