// What PeftCacheManager tells about itself, and what it checks.
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

void PeftCacheManager::reset_device_cache() {
  const std::scoped_lock lock(mutex_);
  device_.demote_all();
}

bool PeftCacheManager::is_task_cached(TaskId task, Tier tier) const {
  const std::scoped_lock lock(mutex_);
  return cache_of(tier).is_resident(task);
}

bool PeftCacheManager::is_task_done(TaskId task) const {
  const std::scoped_lock lock(mutex_);
  return !owners_.has_any(task);
}

bool PeftCacheManager::is_task_done_device(TaskId task) const {
  const std::scoped_lock lock(mutex_);
  return !owners_.has_active(task);
}

std::unordered_map<TaskId, std::set<RequestId>> PeftCacheManager::active_tasks() const {
  const std::scoped_lock lock(mutex_);
  std::unordered_map<TaskId, std::set<RequestId>> tasks;
  for (const auto& [task, sets] : owners_.by_task()) {
    if (!sets.active.empty()) {
      tasks.emplace(task, sets.active);
    }
  }
  return tasks;
}

std::unordered_map<TaskId, std::set<RequestId>> PeftCacheManager::paused_tasks() const {
  const std::scoped_lock lock(mutex_);
  std::unordered_map<TaskId, std::set<RequestId>> tasks;
  for (const auto& [task, sets] : owners_.by_task()) {
    if (!sets.paused.empty()) {
      tasks.emplace(task, sets.paused);
    }
  }
  return tasks;
}

std::optional<TaskId> PeftCacheManager::task_of(RequestId request) const {
  const std::scoped_lock lock(mutex_);
  return owners_.task_of(request);
}

std::size_t PeftCacheManager::num_pages_of(TaskId task) {
  const std::scoped_lock lock(mutex_);
  return layout_of(require_record(task))->num_pages();
}

std::size_t PeftCacheManager::num_pages_of(const AdapterPlan& plan) {
  const std::scoped_lock lock(mutex_);
  return layouts_.get(plan.row_shapes())->num_pages();
}

void PeftCacheManager::read_task(
    TaskId task, Tier tier, const std::function<void(const TaskPages&, const AdapterPlan&)>& read) {
  const std::scoped_lock lock(mutex_);
  if (!cache_of(tier).is_resident(task)) {
    throw PeftTaskNotCachedError(task, cache_of(tier).tier());
  }
  read(pages_of(cache_of(tier), task), *records_.at(task).plan);
}

void PeftCacheManager::evict_unowned(Tier tier) {
  const std::scoped_lock lock(mutex_);
  std::vector<TaskId> victims;
  for (const auto& [task, entry] : cache_of(tier).entries()) {
    if (entry.pins == 0 && !owners_.has_any(task)) {
      victims.push_back(task);
    }
  }
  for (const TaskId task : victims) {
    cache_of(tier).evict(task);
    forget_if_gone(task);
  }
}

std::size_t PeftCacheManager::max_pages(Tier tier) const {
  return cache_of(tier).pool().num_pages();
}

std::size_t PeftCacheManager::free_pages(Tier tier) const {
  const std::scoped_lock lock(mutex_);
  return cache_of(tier).pool().num_free();
}

std::size_t PeftCacheManager::resident_tasks(Tier tier) const {
  const std::scoped_lock lock(mutex_);
  return cache_of(tier).entries().size();
}

std::pair<std::uintptr_t, std::size_t> PeftCacheManager::pool_range(Tier tier) const {
  const PagePool& pool = cache_of(tier).pool();
  return {std::bit_cast<std::uintptr_t>(pool.base()), pool.arena_bytes()};
}

PeftCacheStats PeftCacheManager::stats() const {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

void PeftCacheManager::close() {
  const std::unique_lock lock = lock_without_lease();
  closed_ = true;
}

void PeftCacheManager::check_invariants() const {
  const std::scoped_lock lock(mutex_);
  owners_.check_invariants();
  host_.check_invariants();
  device_.check_invariants();
  const auto require = [](bool holds, TaskId task, const char* what) {
    if (!holds) {
      throw std::logic_error("task " + std::to_string(task.value) + " " + what);
    }
  };
  for (const auto& [task, sets] : owners_.by_task()) {
    const LoraCache::Entry* host = host_.find(task);
    require(host != nullptr && host->state == EntryState::resident && host->pins == 1, task,
            "has owners but is not resident in the host tier with one pin");
  }
  for (const auto& [task, entry] : host_.entries()) {
    require(entry.state == EntryState::resident, task, "is loading although no load runs");
    require(owners_.has_any(task) || entry.pins == 0, task,
            "is pinned in the host tier without owners");
  }
  std::size_t device_pins = 0;
  for (const auto& [task, entry] : device_.entries()) {
    device_pins += entry.pins;
    require(entry.pins <= 1, task, "is pinned in the device tier by more than one lease");
    require(entry.state == EntryState::resident, task, "is loading although no load runs");
    require(
        entry.eviction_class == class_of(task) || entry.eviction_class == EvictionClass::unowned,
        task, "is in an eviction class that its owners do not explain");
  }
  if (device_pins != leased_pins_) {
    throw std::logic_error("leases hold " + std::to_string(leased_pins_) + " device pins, but " +
                           std::to_string(device_pins) + " are counted");
  }
  for (const auto& [task, record] : records_) {
    const bool gone = host_.find(task) == nullptr && device_.find(task) == nullptr;
    require(gone == (record.layout == nullptr), task,
            "keeps a layout while in no tier, or has none");
    require(record.plan->source() != nullptr || !gone || owners_.has_any(task), task,
            "is remembered although nothing can bring it back");
  }
}

}  // namespace pagedlora
