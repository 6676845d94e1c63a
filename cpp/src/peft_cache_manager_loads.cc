// How copies are brought into the tiers and given up.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "internal/job_pool.h"
#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

using internal::FillJob;
using internal::FillTarget;
using internal::OwnTaskPages;
using internal::SourceLoad;
using internal::TierCopy;

TaskPages PeftCacheManager::pages_of(const LoraCache& cache, TaskId task,
                                     const TaskRecord& record) const {
  return {record.layout.get(),
          cache.find(task)->pages.data(),
          record.plan->scales().data(),
          cache.pool().base(),
          params_.page_bytes,
          config_->dtype(),
          cache.pool().device()->is_cpu_readable()};
}

void PeftCacheManager::make_room(Tier tier, std::size_t pages) {
  if (pages <= cache_of(tier).pool().num_free()) {
    return;
  }
  std::optional<TaskId> evicted;  // the last one; a list of them could run out of memory
  const auto forget_last = [&] {
    if (evicted) {
      forget_if_gone(*evicted);
    }
  };
  const auto shortage = cache_of(tier).try_make_room(pages, [&](TaskId victim) {
    forget_last();
    note_eviction(tier, victim);
    evicted = victim;
  });
  if (shortage) {
    cache_of(tier).refuse(*shortage);
  }
  forget_last();
}

// Before a copy is given up: counts it, and stops what fills it.
void PeftCacheManager::note_eviction(Tier tier, TaskId task) {
  const bool on_host = tier == Tier::host;
  TierStats& stats = on_host ? stats_.host : stats_.device;
  const std::size_t pages = cache_of(tier).find(task)->pages.size();
  ++stats.tasks_evicted;
  stats.pages_evicted += pages;
  ++(on_host ? iteration_.tasks_evicted_host : iteration_.tasks_evicted_device);
  (on_host ? iteration_.pages_evicted_host : iteration_.pages_evicted_device) += pages;
  if (options_.on_evict) {
    options_.on_evict(tier, task);
  }
  if (on_host) {
    fail_dependent_device_copy(task, nullptr);
  }
  TaskRecord& record = records_.at(task);
  (on_host ? record.host_entry : record.device_entry) = nullptr;
  const std::shared_ptr<FillJob> job =
      std::exchange(on_host ? record.host_job : record.device_job, nullptr);
  if (job == nullptr) {
    return;
  }
  if (!on_host && job == record.host_job) {
    static_cast<SourceLoad&>(*job).drop_device();  // its host part goes on
  } else {
    job->stop();
  }
  board_->changed.notify_all();  // somebody may wait for it
}

// Before its host copy is given up: a device copy that was to be made with it, or of it, cannot be.
void PeftCacheManager::fail_dependent_device_copy(TaskId task, const std::exception_ptr& error) {
  TaskRecord& record = records_.at(task);
  const LoraCache::Entry* on_device = record.device_entry;
  if (on_device != nullptr && on_device->state == EntryState::loading &&
      (record.device_job == nullptr || record.device_job == record.host_job)) {
    fail_device_copy(task, record, error);
  }
}

// The pins of the batch that is being ensured go with the entry: another call may claim a new one
// while the batch waits for its other tasks.
void PeftCacheManager::fail_device_copy(TaskId task, TaskRecord& record,
                                        const std::exception_ptr& error) {
  record.device_job.reset();
  record.copy_error = error;
  record.device_entry = nullptr;
  device_.fail(task);
  for (BatchTask& item : batch_) {
    if (item.task == task) {
      item.is_pinned = false;
    }
  }
}

void PeftCacheManager::give_up_copy(Tier tier, TaskId task) {
  note_eviction(tier, task);
  cache_of(tier).evict(task);
}

void PeftCacheManager::make_room_on_host(std::size_t pages, bool started) {
  if (const std::optional<Shortage> shortage = host_shortage(pages, started)) {
    host_.refuse(*shortage);
  }
  if (const std::optional<Shortage> shortage = host_.shortage(pages)) {
    revoke_owners(shortage->needed_pages - shortage->free_pages - shortage->evictable_pages);
  }
  make_room(Tier::host, pages);
}

// Why a request cannot have so many host pages now, even if others give up what can be taken from
// them.
std::optional<Shortage> PeftCacheManager::host_shortage(std::size_t pages, bool started) const {
  std::optional<Shortage> shortage = host_.shortage(pages);
  if (shortage && started) {
    for (const Revocable& revocable : revocable_tasks()) {
      shortage->evictable_pages += revocable.pages;
    }
    if (pages <= shortage->free_pages + shortage->evictable_pages) {
      shortage.reset();
    }
  }
  return shortage;
}

// Tasks that can be taken from their owners, of whom none has started.
std::vector<PeftCacheManager::Revocable> PeftCacheManager::revocable_tasks() const {
  std::vector<Revocable> revocable;
  owners_.visit([&](const OwnedTask& task) {
    const auto& record = static_cast<const TaskRecord&>(task);
    if (task.is_revocable() && record.user_pins == 0 && !record.is_leased()) {
      revocable.push_back({task.owned_since(), task.id(), record.layout->num_pages()});
    }
  });
  return revocable;
}

// The latest owners first, until so many pages more can be evicted.
void PeftCacheManager::revoke_owners(std::size_t missing_pages) {
  std::vector<Revocable> revocable = revocable_tasks();
  std::ranges::sort(revocable, std::greater<>(), &Revocable::owned_since);
  for (const Revocable& next : revocable) {
    if (missing_pages == 0) {
      break;
    }
    missing_pages -= std::min(missing_pages, next.pages);
    TaskRecord& record = records_.at(next.task);
    owners_.revoke(record);
    host_.unpin(*record.host_entry);
    update_class(record);
  }
}

// Afterwards the task, which had none, has a host entry that is loading.
void PeftCacheManager::bring_into_host(TaskId task, const std::shared_ptr<const AdapterPlan>& plan,
                                       bool started) {
  TaskRecord& record = records_.at(task);
  try {
    start_host_load(task, record, plan, started);
  } catch (...) {
    forget_if_gone(task);
    throw;
  }
  update_class(record);
  ++stats_.host.misses;
}

void PeftCacheManager::start_host_load(TaskId task, TaskRecord& record,
                                       const std::shared_ptr<const AdapterPlan>& plan,
                                       bool started) {
  check_fits_some_day(record);
  const bool from_device = device_.is_resident(task);
  if (!from_device && plan->source() == nullptr) {
    throw PeftTaskNotCachedError(task);
  }
  // Looked up before victims are: they may include what is left of this task.
  const std::shared_ptr<const Layout> layout = layout_of(record);
  make_room_on_host(layout->num_pages(), started);
  record.layout = layout;
  record.load_error = nullptr;
  if (from_device) {
    start_refill(task, record);
  } else {
    start_source_load(task, record, plan);
  }
}

PageUses PeftCacheManager::claim_on_host(TaskRecord& record) {
  PageUses waits = host_.claim(record.id(), record.layout->num_pages(), ++uses_);
  record.host_entry = host_.find(record.id());
  shortcuts_.remember(record, record.host_entry);
  return waits;
}

void PeftCacheManager::fail_on_host(TaskRecord& record) {
  record.host_entry = nullptr;
  host_.fail(record.id());
}

void PeftCacheManager::start_source_load(TaskId task, TaskRecord& record,
                                         const std::shared_ptr<const AdapterPlan>& plan) {
  const PageUses waits = claim_on_host(record);
  try {
    submit_source_load(task, record, plan, waits);
  } catch (...) {
    fail_on_host(record);
    throw;
  }
}

// Into pages that are claimed.
void PeftCacheManager::submit_source_load(TaskId task, TaskRecord& record,
                                          const std::shared_ptr<const AdapterPlan>& plan,
                                          const PageUses& waits) {
  const auto pages = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                    host_.pool().arena());
  auto job = std::make_shared<SourceLoad>(
      board_, task, SourceLoad::What{config_, plan, record.layout, record.checksum},
      FillTarget{pages, waits}, internal::LoadHelpers{put_workers_, read_helpers_});
  host_.add_page_use(task, job->use());
  put_workers_->submit(job);
  record.host_job = std::move(job);
}

// Host tier <- device tier.
void PeftCacheManager::start_refill(TaskId task, TaskRecord& record) {
  const PageUses waits = claim_on_host(record);
  try {
    const auto from = std::make_shared<OwnTaskPages>(pages_of(device_, task, record), record.layout,
                                                     device_.pool().arena());
    const auto to = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                   host_.pool().arena());
    auto job =
        std::make_shared<TierCopy>(board_, task, device_.pool().device(),
                                   TierCopy::Direction::to_host, from, FillTarget{to, waits});
    host_.add_page_use(task, job->use());
    device_.add_page_use(task, job->use());
    ensure_workers_->submit(job);
    record.host_job = std::move(job);
  } catch (...) {
    fail_on_host(record);
    throw;
  }
}

// Room must have been made. The pages are filled by start_device_fill.
void PeftCacheManager::claim_on_device(TaskId task, TaskRecord& record) {
  record.device_waits = device_.claim(task, record.layout->num_pages(), ++uses_);
  record.device_entry = device_.find(task);
  record.copy_error = nullptr;
  update_class(record);
}

// Fills the device entry that was claimed: now, in the pass that fills the host entry, or, if that
// has gone too far, when it is done. If it throws, the entry is gone.
void PeftCacheManager::start_device_fill(TaskId task, TaskRecord& record) {
  try {
    const auto to = std::make_shared<OwnTaskPages>(pages_of(device_, task, record), record.layout,
                                                   device_.pool().arena());
    const FillTarget target{to, record.device_waits};
    if (host_.is_resident(task)) {
      start_device_copy(task, record, target);
    } else {
      join_source_load(task, record, target);
    }
  } catch (...) {
    fail_device_copy(task, record, std::current_exception());
    throw;
  }
}

void PeftCacheManager::start_device_copy(TaskId task, TaskRecord& record,
                                         const FillTarget& target) {
  const auto from = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                   host_.pool().arena());
  auto job = std::make_shared<TierCopy>(board_, task, device_.pool().device(),
                                        TierCopy::Direction::to_device, from, target);
  device_.add_page_use(task, job->use());
  host_.add_page_use(task, job->use());
  ensure_workers_->submit(job);
  record.device_job = std::move(job);
  record.device_waits.clear();
}

void PeftCacheManager::join_source_load(TaskId task, TaskRecord& record, const FillTarget& target) {
  const auto load = std::dynamic_pointer_cast<SourceLoad>(record.host_job);
  if (load == nullptr || !device_.pool().device()->is_host_memory() || !load->add_device(target)) {
    return;
  }
  record.device_job = load;
  device_.add_page_use(task, load->device_use());
  record.device_waits.clear();
}

}  // namespace pagedlora
