// What PeftCacheManager tells about itself, and what it checks.
#include <algorithm>
#include <atomic>
#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

void PeftCacheManager::reset_device_cache() {
  const Lock lock = enter();
  device_.demote_all();
}

bool PeftCacheManager::is_task_cached(TaskId task, Tier tier) const {
  const Lock lock = enter();
  return cache_of(tier).is_resident(task);
}

bool PeftCacheManager::is_task_done(TaskId task) const {
  const Lock lock = enter();
  const auto found = records_.find(task);
  return found == records_.end() || !found->second.is_owned();
}

bool PeftCacheManager::is_task_done_device(TaskId task) const {
  const Lock lock = enter();
  const auto found = records_.find(task);
  return found == records_.end() || found->second.num_active() == 0;
}

std::unordered_map<TaskId, std::set<RequestId>> PeftCacheManager::active_tasks() const {
  const Lock lock = enter();
  std::unordered_map<TaskId, std::set<RequestId>> tasks;
  owners_.visit([&](const OwnedTask& task) {
    if (task.num_active() != 0) {
      tasks.emplace(task.id(), task.active());
    }
  });
  return tasks;
}

std::unordered_map<TaskId, std::set<RequestId>> PeftCacheManager::paused_tasks() const {
  const Lock lock = enter();
  std::unordered_map<TaskId, std::set<RequestId>> tasks;
  owners_.visit([&](const OwnedTask& task) {
    if (task.num_paused() != 0) {
      tasks.emplace(task.id(), task.paused());
    }
  });
  return tasks;
}

std::optional<TaskId> PeftCacheManager::task_of(RequestId request) const {
  const Lock lock = enter();
  return owners_.task_of(request);
}

bool PeftCacheManager::has_started(RequestId request) const {
  const Lock lock = enter();
  return owners_.has_started(request);
}

bool PeftCacheManager::was_revoked(RequestId request) const {
  const Lock lock = enter();
  return owners_.was_revoked(request);
}

std::size_t PeftCacheManager::num_pages_of(TaskId task) {
  const Lock lock = enter();
  return layout_of(require_record(task))->num_pages();
}

std::size_t PeftCacheManager::num_pages_of(const AdapterPlan& plan) {
  const Lock lock = enter();
  return layouts_.get(plan.row_shapes())->num_pages();
}

void PeftCacheManager::read_task(
    TaskId task, Tier tier, const std::function<void(const TaskPages&, const AdapterPlan&)>& read) {
  // Stays with the pages while they are read, even if their task is evicted meanwhile.
  struct Reading final : PageUse {
    bool is_over() const override { return over; }
    std::atomic<bool> over{false};
  };
  const auto reading = std::make_shared<Reading>();
  std::shared_ptr<const AdapterPlan> plan;
  std::optional<internal::OwnTaskPages> pages;
  {
    const Lock lock = enter();
    LoraCache& cache = cache_of(tier);
    if (!cache.is_resident(task)) {
      throw PeftTaskNotCachedError(task, cache.tier());
    }
    const TaskRecord& record = records_.at(task);
    plan = record.plan;
    pages.emplace(pages_of(cache, task, record), record.layout, cache.pool().arena());
    cache.add_page_use(task, reading);
  }
  try {
    std::optional<internal::HostCopy> copy;
    if (tier == Tier::device && !device_.pool().device()->is_cpu_readable()) {
      copy.emplace(pages->view(), *device_.pool().device());
    }
    TaskPages view = copy ? copy->view() : pages->view();
    view.scales = plan->scales().data();
    read(view, *plan);
  } catch (...) {
    reading->over = true;
    throw;
  }
  reading->over = true;
}

void PeftCacheManager::evict_unowned(Tier tier) {
  const Lock lock = enter();
  std::vector<TaskId> victims;
  for (const auto& [task, entry] : cache_of(tier).entries()) {
    if (entry.pins == 0 && !records_.at(task).is_owned()) {
      victims.push_back(task);
    }
  }
  std::ranges::sort(victims);  // the order in which they are told of
  for (const TaskId task : victims) {
    if (cache_of(tier).find(task) != nullptr) {
      give_up_copy(tier, task);
    }
    forget_if_gone(task);
  }
}

std::size_t PeftCacheManager::max_pages(Tier tier) const {
  return cache_of(tier).pool().num_pages();
}

std::size_t PeftCacheManager::free_pages(Tier tier) const {
  const Lock lock = enter();
  return cache_of(tier).pool().num_free();
}

std::size_t PeftCacheManager::resident_tasks(Tier tier) const {
  const Lock lock = enter();
  return cache_of(tier).entries().size();
}

std::pair<std::uintptr_t, std::size_t> PeftCacheManager::pool_range(Tier tier) const {
  const PagePool& pool = cache_of(tier).pool();
  return {std::bit_cast<std::uintptr_t>(pool.base()), pool.arena_bytes()};
}

PeftCacheStats PeftCacheManager::stats() const {
  const Lock lock = enter();
  return stats_;
}

IterationStats PeftCacheManager::get_and_reset_iteration_stats() {
  const Lock lock = enter();
  IterationStats stats = std::exchange(iteration_, {});
  stats.device_pages_total = device_.pool().num_pages();
  stats.device_pages_available = device_.pool().num_free();
  stats.host_pages_total = host_.pool().num_pages();
  stats.host_pages_available = host_.pool().num_free();
  for (const auto& [task, entry] : device_.entries()) {
    ++(records_.at(task).num_active() != 0 ? stats.device_tasks_in_progress
                                           : stats.device_tasks_done);
  }
  owners_.visit([&](const OwnedTask& task) {
    stats.active_tasks += task.num_active() == 0 ? 0U : 1U;
    stats.paused_tasks += task.num_paused() == 0 ? 0U : 1U;
  });
  return stats;
}

namespace {

void require(bool holds, TaskId task, const char* what) {
  if (!holds) {
    throw std::logic_error("task " + std::to_string(task.value) + " " + what);
  }
}

}  // namespace

void PeftCacheManager::check_invariants() const {
  const Lock lock = enter();
  owners_.check_invariants();
  host_.check_invariants();
  device_.check_invariants();
  check_host_pins();
  check_device_pins();
  check_records();
}

void PeftCacheManager::check_host_pins() const {
  std::size_t user_pinned = 0;
  owners_.visit([&](const OwnedTask& task) {
    require(host_.find(task.id()) != nullptr, task.id(), "has owners but is not in the host tier");
  });
  for (const auto& [task, entry] : host_.entries()) {
    const TaskRecord& record = records_.at(task);
    const unsigned pins = (record.is_owned() ? 1U : 0U) + (record.user_pins != 0 ? 1U : 0U);
    require(entry.pins == pins, task, "has other pins in the host tier than its owners explain");
    require((entry.state == EntryState::loading) == (record.host_job != nullptr), task,
            "is loading into the host tier without a load, or has a load without loading");
    user_pinned += record.user_pins != 0 ? entry.pages.size() : 0;
  }
  if (user_pinned != user_pinned_pages_) {
    throw std::logic_error("the pages that users pinned are miscounted");
  }
}

void PeftCacheManager::check_device_pins() const {
  std::size_t device_pins = 0;
  for (const auto& [task, entry] : device_.entries()) {
    const TaskRecord& record = records_.at(task);
    device_pins += entry.pins;
    const bool is_loading = entry.state == EntryState::loading;
    require(is_loading || record.device_job == nullptr, task,
            "is resident in the device tier although a copy runs");
    require(!is_loading || record.device_job != nullptr || record.host_job != nullptr, task,
            "is loading into the device tier from nowhere");
  }
  const auto pending = std::ranges::count_if(batch_, &BatchTask::is_pinned);
  if (device_pins != leased_pins_ + static_cast<std::size_t>(pending)) {
    throw std::logic_error("leases hold " + std::to_string(leased_pins_) + " device pins, " +
                           std::to_string(pending) + " are a batch's to be, but " +
                           std::to_string(device_pins) + " are there");
  }
}

void PeftCacheManager::check_records() const {
  std::size_t num_owned = 0;
  owners_.visit([&](const OwnedTask& task) {
    const auto found = records_.find(task.id());
    require(found != records_.end() && &found->second == &task, task.id(),
            "has owners but another record, or none");
    ++num_owned;
  });
  std::size_t num_remembered = 0;
  for (const auto& [task, record] : records_) {
    num_remembered += shortcuts_.find(task) == &record ? 1U : 0U;
    require(record.id() == task && record.host_entry == host_.find(task) &&
                record.device_entry == device_.find(task),
            task, "has a record of another task, or of entries that are not there");
    num_owned -= record.is_owned() ? 1U : 0U;
    const bool gone = !record.is_in_a_tier();
    require(gone == (record.layout == nullptr), task,
            "keeps a layout while in no tier, or has none");
    require(record.plan->source() != nullptr || !gone || record.is_owned(), task,
            "is remembered although nothing can bring it back");
    require(record.host_entry != nullptr || (record.host_job == nullptr && record.user_pins == 0),
            task, "is loaded or pinned without being in the host tier");
    require(record.device_entry != nullptr || record.device_job == nullptr, task,
            "is copied to the device without being there");
  }
  if (num_owned != 0 || num_remembered != shortcuts_.size()) {
    throw std::logic_error("a task has owners that nobody lists, or a shortcut leads nowhere");
  }
  for (const TaskId task : window_) {
    require(records_.contains(task), task, "is unknown but in the prefetch window");
  }
  const auto num_placed = std::ranges::count_if(
      records_, [](const auto& item) { return item.second.window_position != kNoDistance; });
  if (static_cast<std::size_t>(num_placed) != window_.size()) {
    throw std::logic_error("a task has a place in a prefetch window that is over");
  }
}

}  // namespace pagedlora
