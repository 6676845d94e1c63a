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
  return {record.layout.get(),          cache.find(task)->pages.data(),
          record.plan->scales().data(), cache.pool().base(),
          params_.page_bytes,           config_->dtype()};
}

void PeftCacheManager::make_room(Tier tier, std::size_t pages) {
  if (pages <= cache_of(tier).pool().num_free()) {
    return;
  }
  std::vector<TaskId> evicted;
  const auto shortage = cache_of(tier).try_make_room(pages, [&](TaskId victim) {
    note_eviction(tier, victim);
    evicted.push_back(victim);
  });
  if (shortage) {
    cache_of(tier).refuse(*shortage);
  }
  for (const TaskId task : evicted) {
    forget_if_gone(task);
  }
}

// Counts it, and stops what fills the copy.
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
  const LoraCache::Entry* on_device = device_.find(task);
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
  for (const auto& [task, sets] : owners_.by_task()) {
    const TaskRecord& record = records_.at(task);
    const LoraCache::Entry* on_device = device_.find(task);
    const bool is_leased = on_device != nullptr && on_device->pins != 0;
    if (sets.is_revocable() && record.user_pins == 0 && !is_leased) {
      revocable.push_back({sets.owned_since, task, record.layout->num_pages()});
    }
  }
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
    owners_.revoke(next.task);
    host_.unpin(next.task);
    update_class(next.task);
  }
}

// Afterwards the task, which had none, has a host entry that is loading.
void PeftCacheManager::bring_into_host(TaskId task, const std::shared_ptr<const AdapterPlan>& plan,
                                       bool started) {
  TaskRecord& record = records_.at(task);
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
  update_class(task);
  ++stats_.host.misses;
}

void PeftCacheManager::start_source_load(TaskId task, TaskRecord& record,
                                         const std::shared_ptr<const AdapterPlan>& plan) {
  const PageUses waits = host_.claim(task, record.layout->num_pages(), ++uses_);
  try {
    const auto pages = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                      host_.pool().arena());
    auto job = std::make_shared<SourceLoad>(
        board_, task, SourceLoad::What{config_, plan, record.layout, record.checksum},
        FillTarget{pages, waits});
    host_.add_page_use(task, job);
    put_workers_->submit(job);
    record.host_job = std::move(job);
  } catch (...) {
    host_.fail(task);
    throw;
  }
}

// Host tier <- device tier.
void PeftCacheManager::start_refill(TaskId task, TaskRecord& record) {
  const PageUses waits = host_.claim(task, record.layout->num_pages(), ++uses_);
  try {
    const auto from = std::make_shared<OwnTaskPages>(pages_of(device_, task, record), record.layout,
                                                     device_.pool().arena());
    const auto to = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                   host_.pool().arena());
    auto job =
        std::make_shared<TierCopy>(board_, task, device_.pool().device(),
                                   TierCopy::Direction::to_host, from, FillTarget{to, waits});
    host_.add_page_use(task, job);
    device_.add_page_use(task, job);
    ensure_workers_->submit(job);
    record.host_job = std::move(job);
  } catch (...) {
    host_.fail(task);
    throw;
  }
}

// Room must have been made. The pages are filled by start_device_fill.
void PeftCacheManager::claim_on_device(TaskId task, TaskRecord& record) {
  record.device_waits = device_.claim(task, record.layout->num_pages(), ++uses_);
  record.copy_error = nullptr;
  update_class(task);
}

// Fills the device entry that was claimed: now, in the pass that fills the host entry, or, if that
// has gone too far, when it is done.
void PeftCacheManager::start_device_fill(TaskId task, TaskRecord& record) {
  const auto to = std::make_shared<OwnTaskPages>(pages_of(device_, task, record), record.layout,
                                                 device_.pool().arena());
  const FillTarget target{to, record.device_waits};
  if (host_.is_resident(task)) {
    const auto from = std::make_shared<OwnTaskPages>(pages_of(host_, task, record), record.layout,
                                                     host_.pool().arena());
    auto job = std::make_shared<TierCopy>(board_, task, device_.pool().device(),
                                          TierCopy::Direction::to_device, from, target);
    device_.add_page_use(task, job);
    host_.add_page_use(task, job);
    ensure_workers_->submit(job);
    record.device_job = std::move(job);
    record.device_waits.clear();
  } else if (const auto load = std::dynamic_pointer_cast<SourceLoad>(record.host_job);
             load != nullptr && device_.pool().device()->is_host_memory() &&
             load->add_device(target)) {
    device_.add_page_use(task, load->device_use());
    record.device_job = load;
    record.device_waits.clear();
  }
}

bool PeftCacheManager::is_current(const FillJob& job) const {
  const auto found = records_.find(job.task());
  return found != records_.end() &&
         (found->second.host_job.get() == &job || found->second.device_job.get() == &job);
}

// Removes from the board what is wanted, in the order in which it ended, and what nobody needs.
std::vector<std::shared_ptr<FillJob>> PeftCacheManager::take_finished(
    const std::function<bool(const FillJob&)>& wanted) {
  std::vector<std::shared_ptr<FillJob>> taken;
  std::erase_if(board_->finished, [&](const std::shared_ptr<internal::Job>& finished) {
    auto job = std::static_pointer_cast<FillJob>(finished);
    const bool is_needed = is_current(*job);
    if (is_needed && wanted(*job)) {
      taken.push_back(std::move(job));
      return true;
    }
    return !is_needed;
  });
  return taken;
}

// The job has ended, with an error or without: its entries become resident or absent.
void PeftCacheManager::apply(FillJob& job, const std::exception_ptr& error) {
  const TaskId task = job.task();
  TaskRecord& record = records_.at(task);
  const bool on_device = record.device_job.get() == &job;
  const bool on_host = record.host_job.get() == &job;
  stats_.failed_loads += error == nullptr ? 0U : 1U;
  if (on_device) {
    apply_to_device(record, job, error);
  }
  if (on_host) {
    apply_to_host(record, job, error);
  }
  forget_if_gone(task);
  board_->changed.notify_all();
}

void PeftCacheManager::apply_to_device(TaskRecord& record, FillJob& job,
                                       const std::exception_ptr& error) {
  if (error != nullptr) {
    fail_device_copy(job.task(), record, error);
    return;
  }
  record.device_job.reset();
  device_.publish(job.task());
  stats_.device.bytes_loaded += record.layout->payload_bytes();
  stats_.device.load_seconds += job.seconds();
}

void PeftCacheManager::apply_to_host(TaskRecord& record, FillJob& job,
                                     const std::exception_ptr& error) {
  const TaskId task = job.task();
  if (error != nullptr) {
    record.load_error = error;
    if (record.user_pins != 0) {
      user_pinned_pages_ -= record.layout->num_pages();
      record.user_pins = 0;
    }
    fail_dependent_device_copy(task, error);
    record.host_job.reset();
    host_.fail(task);
    fail_owners(task, error);
    return;
  }
  record.host_job.reset();
  host_.publish(task);
  stats_.host.bytes_loaded += record.layout->payload_bytes();
  stats_.host.load_seconds += job.seconds();
  if (const auto* load = dynamic_cast<const SourceLoad*>(&job)) {
    ++stats_.source_reads;
    stats_.source_rereads += record.checksum ? 1U : 0U;
    stats_.source_bytes += load->source_bytes();
    record.checksum = load->checksum();
  }
  if (device_.find(task) != nullptr && !device_.is_resident(task) && record.device_job == nullptr) {
    start_device_fill(task, record);
  }
}

void PeftCacheManager::fail_owners(TaskId task, const std::exception_ptr& error) {
  const TaskOwners::Sets* sets = owners_.sets_of(task);
  if (sets != nullptr) {
    newly_failed_.insert(newly_failed_.end(), sets->active.begin(), sets->active.end());
    newly_failed_.insert(newly_failed_.end(), sets->paused.begin(), sets->paused.end());
    owners_.fail(task, error);
    update_class(task);
  }
}

void PeftCacheManager::expire_loads() {
  put_workers_->expire();
  ensure_workers_->expire();
}

// Until something changes, a load's time is up, or the deadline has come; may return earlier.
void PeftCacheManager::wait_for_change(Lock& lock, Clock::Time deadline) {
  for (const internal::JobPool* workers : {put_workers_.get(), ensure_workers_.get()}) {
    deadline = std::min(deadline, workers->next_expiry().value_or(deadline));
  }
  clock_->wait_until(lock, board_->changed, deadline);
}

bool PeftCacheManager::is_idle() const {
  return put_workers_->is_idle() && ensure_workers_->is_idle();
}

std::vector<RequestId> PeftCacheManager::poll(Clock::Time timeout, const Agree& agree) {
  Lock lock(mutex_);
  const Clock::Time deadline = clock_->now() + timeout;
  expire_loads();
  const auto has_news = [&] {
    return !newly_failed_.empty() ||
           std::ranges::any_of(board_->finished, [&](const std::shared_ptr<internal::Job>& job) {
             return is_current(static_cast<const FillJob&>(*job));
           });
  };
  while (!has_news() && !is_idle() && !closed_ && clock_->now() < deadline) {
    wait_for_change(lock, deadline);
    expire_loads();
  }
  if (!agree) {
    for (const auto& job : take_finished([](const FillJob&) { return true; })) {
      apply(*job, job->error());
    }
    return take_newly_failed();
  }
  std::vector<LoadOutcome> ended;
  for (const std::shared_ptr<internal::Job>& finished : board_->finished) {
    const auto& job = static_cast<const FillJob&>(*finished);
    if (is_current(job)) {
      const Tier tier = records_.at(job.task()).host_job.get() == &job ? Tier::host : Tier::device;
      ended.push_back({job.task(), tier, job.error() == nullptr});
    }
  }
  lock.unlock();
  const std::vector<LoadOutcome> agreed = agree(ended);
  lock.lock();
  for (const LoadOutcome& outcome : agreed) {
    const auto jobs = take_finished([&](const FillJob& job) {
      const TaskRecord& record = records_.at(job.task());
      const auto& expected = outcome.tier == Tier::host ? record.host_job : record.device_job;
      return job.task() == outcome.task && expected.get() == &job;
    });
    for (const auto& job : jobs) {
      apply(*job, outcome.loaded || job->error() != nullptr
                      ? job->error()
                      : std::make_exception_ptr(Error("the load of task " +
                                                      std::to_string(outcome.task.value) +
                                                      " failed on another rank")));
    }
  }
  return take_newly_failed();
}

// In an order that does not tell which load ended first, without those that are done by now.
std::vector<RequestId> PeftCacheManager::take_newly_failed() {
  std::erase_if(newly_failed_,
                [this](RequestId request) { return owners_.failure_of(request) == nullptr; });
  std::ranges::sort(newly_failed_);
  const auto repeated = std::ranges::unique(newly_failed_);
  newly_failed_.erase(repeated.begin(), repeated.end());
  return std::exchange(newly_failed_, {});
}

bool PeftCacheManager::wait_idle(Clock::Time timeout) {
  Lock lock(mutex_);
  const Clock::Time deadline = clock_->now() + timeout;
  for (;;) {
    expire_loads();
    for (const auto& job : take_finished([](const FillJob&) { return true; })) {
      apply(*job, job->error());
    }
    if (is_idle() || clock_->now() >= deadline) {
      return is_idle();
    }
    wait_for_change(lock, deadline);
  }
}

void PeftCacheManager::close() {
  const auto closed =
      std::make_exception_ptr(InvalidArgumentError("the PEFT cache manager is closed"));
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    put_workers_->stop(closed);
    ensure_workers_->stop(closed);
    for (const auto& job : take_finished([](const FillJob&) { return true; })) {
      apply(*job, job->error());
    }
    board_->changed.notify_all();
  }
  lock_without_lease(nullptr);
}

}  // namespace pagedlora
