// How loads that have ended take effect.
#include <algorithm>
#include <utility>

#include "internal/job_pool.h"
#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

using internal::FillJob;
using internal::SourceLoad;
using internal::TierCopy;

bool PeftCacheManager::is_current(const FillJob& job) const {
  const auto found = records_.find(job.task());
  return found != records_.end() &&
         (found->second.host_job.get() == &job || found->second.device_job.get() == &job);
}

// Whether the job fills the task's entry in this tier. It may fill both.
bool PeftCacheManager::fills(const FillJob& job, Tier tier) const {
  const TaskRecord& record = records_.at(job.task());
  return (tier == Tier::host ? record.host_job : record.device_job).get() == &job;
}

// Lets what is wanted of the loads that have ended take effect, in the order in which they ended.
// Jobs that nobody needs any more go to `over`: to be destroyed without the lock, also if this throws.
void PeftCacheManager::settle(internal::JobList& over, const Wanted& wanted) {
  internal::JobList& finished = board_->finished;
  for (auto at = finished.begin(); at != finished.end();) {
    auto& job = static_cast<FillJob&>(**at);
    for (const Tier tier : {Tier::host, Tier::device}) {
      if (is_current(job) && fills(job, tier) && wanted(job, tier)) {
        apply(job, tier, job.error());
      }
    }
    const auto next = std::next(at);
    if (!is_current(job)) {
      over.splice(over.end(), finished, at);
    }
    at = next;
  }
}

// The job has ended, with an error or without: the entry becomes resident or absent.
void PeftCacheManager::apply(FillJob& job, Tier tier, const std::exception_ptr& error) {
  const TaskId task = job.task();
  TaskRecord& record = records_.at(task);
  if (tier == Tier::host) {
    apply_to_host(record, job, error);
  } else {
    apply_to_device(record, job, error);
  }
  forget_if_gone(task);
  stats_.failed_loads += error == nullptr ? 0U : 1U;
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
  ++stats_.device.tasks_loaded;
  stats_.device.bytes_loaded += record.layout->payload_bytes();
  stats_.device.load_seconds += job.seconds();
}

void PeftCacheManager::apply_to_host(TaskRecord& record, FillJob& job,
                                     const std::exception_ptr& error) {
  if (error != nullptr) {
    if (!reads_source_instead(record, job)) {
      fail_host_copy(job.task(), record, error);
    }
    return;
  }
  const TaskId task = job.task();
  record.host_job.reset();
  host_.publish(task);
  ++stats_.host.tasks_loaded;
  stats_.host.bytes_loaded += record.layout->payload_bytes();
  stats_.host.load_seconds += job.seconds();
  if (const auto* load = dynamic_cast<const SourceLoad*>(&job)) {
    ++stats_.source_reads;
    stats_.source_rereads += record.checksum ? 1U : 0U;
    stats_.source_bytes += load->source_bytes();
    record.checksum = load->checksum();
  }
  const LoraCache::Entry* on_device = record.device_entry;
  if (on_device != nullptr && on_device->state != EntryState::resident &&
      record.device_job == nullptr) {
    try {
      start_device_fill(task, record);
    } catch (const std::exception&) {
      ++stats_.failed_loads;  // the record has the error
    }
  }
}

// A host copy that could not be made from the device's is read from the source, if there is one: into
// the same pages, when the copy has left them.
bool PeftCacheManager::reads_source_instead(TaskRecord& record, const FillJob& job) {
  if (closed_ || dynamic_cast<const TierCopy*>(&job) == nullptr ||
      record.plan->source() == nullptr) {
    return false;
  }
  try {
    submit_source_load(job.task(), record, record.plan, {job.use()});
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void PeftCacheManager::fail_host_copy(TaskId task, TaskRecord& record,
                                      const std::exception_ptr& error) {
  fail_owners(record, error);  // all that may throw
  record.load_error = error;
  if (record.user_pins != 0) {
    user_pinned_pages_ -= record.layout->num_pages();
    record.user_pins = 0;
  }
  fail_dependent_device_copy(task, error);
  record.host_job.reset();
  fail_on_host(record);
}

void PeftCacheManager::fail_owners(TaskRecord& record, const std::exception_ptr& error) {
  if (!record.is_owned()) {
    return;
  }
  newly_failed_.reserve(newly_failed_.size() + record.num_owners());
  const std::set<RequestId> active = record.active();
  const std::set<RequestId> paused = record.paused();
  owners_.fail(record, error);
  newly_failed_.insert(newly_failed_.end(), active.begin(), active.end());
  newly_failed_.insert(newly_failed_.end(), paused.begin(), paused.end());
  update_class(record);
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
  internal::JobList over;  // outlives the lock
  Lock lock = enter();
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
    settle_all(over);
    return take_newly_failed();
  }
  const std::vector<LoadOutcome> ended = ended_loads();
  lock.unlock();
  const std::vector<LoadOutcome> agreed = agree(ended);
  lock.lock();
  apply_agreed(agreed);
  settle(over, [](const FillJob&, Tier) { return false; });
  return take_newly_failed();
}

std::vector<LoadOutcome> PeftCacheManager::ended_loads() const {
  std::vector<LoadOutcome> ended;
  for (const std::shared_ptr<internal::Job>& finished : board_->finished) {
    const auto& job = static_cast<const FillJob&>(*finished);
    for (const Tier tier : {Tier::host, Tier::device}) {
      if (is_current(job) && fills(job, tier)) {
        ended.push_back({job.task(), tier, job.error() == nullptr});
      }
    }
  }
  return ended;
}

// In the order in which the ranks agreed on them. A load that fills both tiers at once on one rank
// is two on another: each tier has an outcome of its own.
void PeftCacheManager::apply_agreed(const std::vector<LoadOutcome>& agreed) {
  for (const LoadOutcome& outcome : agreed) {
    for (const std::shared_ptr<internal::Job>& finished : board_->finished) {
      auto& job = static_cast<FillJob&>(*finished);
      if (job.task() != outcome.task || !is_current(job) || !fills(job, outcome.tier)) {
        continue;
      }
      apply(job, outcome.tier,
            outcome.loaded || job.error() != nullptr
                ? job.error()
                : std::make_exception_ptr(Error("the load of task " +
                                                std::to_string(outcome.task.value) +
                                                " failed on another rank")));
      break;
    }
  }
}

void PeftCacheManager::settle_all(internal::JobList& over) {
  settle(over, [](const FillJob&, Tier) { return true; });
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
  internal::JobList over;  // outlives the lock
  Lock lock = enter();
  const Clock::Time deadline = clock_->now() + timeout;
  for (;;) {
    expire_loads();
    settle_all(over);
    if (is_idle() || clock_->now() >= deadline) {
      return is_idle();
    }
    wait_for_change(lock, deadline);
  }
}

void PeftCacheManager::close() {
  if (!process_.is_here()) {
    return;
  }
  const auto closed =
      std::make_exception_ptr(InvalidArgumentError("the PEFT cache manager is closed"));
  internal::JobList over;
  {
    const Lock lock = enter();
    closed_ = true;
    put_workers_->stop(closed);
    read_helpers_->stop(closed);
    ensure_workers_->stop(closed);
    settle_all(over);
    board_->changed.notify_all();
  }
  over.clear();
  lock_without_lease(nullptr);
}

}  // namespace pagedlora
