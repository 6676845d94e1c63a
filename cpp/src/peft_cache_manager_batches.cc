// How batches are brought to the device and held there.
#include <algorithm>
#include <utility>

#include "internal/job_pool.h"
#include "internal/lease_pool.h"
#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

std::shared_ptr<BatchLease> PeftCacheManager::ensure_batch(std::span<const RequestId> requests,
                                                           bool reset_device_cache, void* stream) {
  process_.check("this PEFT cache manager");
  const std::scoped_lock one_at_a_time(batch_mutex_);
  internal::JobList over;             // outlives the lock
  std::shared_ptr<BatchLease> lease;  // as well: when something throws, its end takes the lock
  Lock lock = lock_for_batch(stream);
  check_open();
  lease = leases_->make([this](const std::vector<BatchLease::LeasedTask>& tasks, void* last_reads) {
    release_lease(tasks, last_reads);
  });
  ++num_open_leases_;
  ++batch_number_;
  batch_.clear();
  resolve_batch(requests, *lease);
  try {
    claim_batch(reset_device_cache);
    wait_for_batch(lock, over);
    fill_lease(requests, *lease);
    open_leases_.push_back(lease);
    start_requests(*lease);
  } catch (...) {
    undo_batch();
    throw;
  }
  board_->changed.notify_all();  // somebody may wait for leases that can be closed
  return lease;
}

// The distinct tasks of the requests, in call order; requests that cannot be served get their
// error.
void PeftCacheManager::resolve_batch(std::span<const RequestId> requests, BatchLease& lease) {
  for (const RequestId request : requests) {
    if (const TaskOwners::Failure* failure = owners_.failure_of(request)) {
      lease.add_error(request, failure->error);
      continue;
    }
    const std::optional<TaskId> task = owners_.task_of(request);
    if (!task || !owners_.is_active(request)) {
      lease.add_error(request, std::make_exception_ptr(InvalidArgumentError(
                                   "request " + std::to_string(request.value) +
                                   (task ? " is paused" : " was never added") +
                                   ": call add_request_peft before ensure_batch")));
      continue;
    }
    TaskRecord& record = records_.at(*task);
    if (record.batch != batch_number_) {
      record.batch = batch_number_;
      batch_.push_back({*task, false, false});
    }
  }
}

// Pins what is there and claims pages for the rest: all of it or, with an error, nothing.
void PeftCacheManager::claim_batch(bool reset_device_cache) {
  std::size_t needed = 0;
  std::size_t kept = 0;
  for (const BatchTask& item : batch_) {
    const TaskRecord& record = records_.at(item.task);
    const LoraCache::Entry* entry = record.device_entry;
    needed += entry == nullptr ? record.layout->num_pages() : 0;
    kept += entry != nullptr && entry->pins == 0 ? entry->pages.size() : 0;
  }
  if (const std::optional<Shortage> shortage = device_.shortage(needed, kept)) {
    device_.refuse(*shortage);
  }
  if (reset_device_cache) {
    device_.demote_all();
  }
  pin_present_tasks();
  make_room(Tier::device, needed);
  for (BatchTask& item : batch_) {
    if (item.is_pinned) {
      device_.use(item.task, ++uses_);
      continue;
    }
    ++stats_.device.misses;
    TaskRecord& record = records_.at(item.task);
    claim_on_device(item.task, record);
    device_.pin(item.task);
    item.is_pinned = item.is_claimed = true;
    start_device_fill(item.task, record);
  }
}

void PeftCacheManager::pin_present_tasks() {
  for (BatchTask& item : batch_) {
    const TaskRecord& record = records_.at(item.task);
    if (record.device_entry != nullptr) {
      ++stats_.device.hits;
      device_.pin(*record.device_entry);
      item.is_pinned = true;
      update_class(record);
    }
  }
}

// Whether the task's device copy is there, or will not be: a pin goes with a copy that fails.
bool PeftCacheManager::is_settled(const BatchTask& item) const {
  return !item.is_pinned || device_.is_resident(item.task);
}

// Whether the batch waits for what the job fills in this tier: the device copy of one of its tasks
// that is not there yet, or the host copy that this one is made with.
bool PeftCacheManager::is_awaited(const internal::FillJob& job, Tier tier) const {
  const TaskRecord& record = records_.at(job.task());
  if (record.batch != batch_number_ || device_.is_resident(job.task())) {
    return false;
  }
  return tier == Tier::device || record.device_job == nullptr ||
         record.device_job == record.host_job;
}

// Lets the loads that the batch waits for take effect as they end, and no other ones: what else has
// ended waits for poll(), so that its effect does not depend on when it ended. Jobs that nobody needs
// any more go to `over`.
void PeftCacheManager::wait_for_batch(Lock& lock, internal::JobList& over) {
  const auto is_settled_task = [this](const BatchTask& item) { return is_settled(item); };
  if (std::ranges::all_of(batch_, is_settled_task)) {
    return;
  }
  const Clock::Time deadline = clock_->now() + options_.load_timeout;
  for (;;) {
    expire_loads();
    settle(over, [this](const internal::FillJob& job, Tier tier) { return is_awaited(job, tier); });
    check_open();  // it may have been closed meanwhile
    if (std::ranges::all_of(batch_, is_settled_task)) {
      return;
    }
    if (clock_->now() >= deadline) {
      give_back_unsettled(std::make_exception_ptr(
          AdapterLoadTimeout(std::chrono::duration<double>(options_.load_timeout).count())));
      return;
    }
    wait_for_change(lock, deadline);
  }
}

// Copies that did not come in time: those that this batch claimed are given up, prefetched ones go
// on.
void PeftCacheManager::give_back_unsettled(const std::exception_ptr& error) {
  for (BatchTask& item : batch_) {
    if (is_settled(item)) {
      continue;
    }
    records_.at(item.task).copy_error = error;
    device_.unpin(item.task);
    item.is_pinned = false;
    if (item.is_claimed) {
      give_up_copy(Tier::device, item.task);
    }
  }
}

std::exception_ptr PeftCacheManager::error_of(RequestId request) const {
  if (const TaskOwners::Failure* failure = owners_.failure_of(request)) {
    return failure->error;
  }
  const std::optional<TaskId> task = owners_.task_of(request);
  if (task && records_.at(*task).copy_error != nullptr) {
    return records_.at(*task).copy_error;
  }
  return std::make_exception_ptr(
      InvalidArgumentError("request " + std::to_string(request.value) +
                           " was marked done, or lost its adapter, while its batch was ensured"));
}

// Tasks whose copy is not there are left out, and their requests get the error.
void PeftCacheManager::fill_lease(std::span<const RequestId> requests, BatchLease& lease) {
  for (BatchTask& item : batch_) {
    if (item.is_pinned) {
      TaskRecord& record = records_.at(item.task);
      device_.reserve_page_use(item.task);  // of its reads, which release_lease may add
      lease.add_task({item.task, pages_of(device_, item.task, record), record.layout});
      record.lease_position = lease.tasks().size() - 1;
      item.is_pinned = false;  // from here on the pin is the lease's
      ++leased_pins_;
    }
  }
  for (const RequestId request : requests) {
    const std::optional<TaskId> task = owners_.task_of(request);
    if (lease.errors().contains(request)) {
      continue;
    }
    if (!task || owners_.failure_of(request) != nullptr || !is_leased_by(lease, *task)) {
      lease.add_error(request, error_of(request));
      continue;
    }
    lease.add_request(request, records_.at(*task).lease_position);
  }
  lease.sort_requests();
}

void PeftCacheManager::start_requests(const BatchLease& lease) noexcept {
  for (const BatchLease::LeasedRequest& leased : lease.requests()) {
    if (owners_.start(leased.request)) {
      update_class(records_.at(lease.tasks()[leased.position].task));
    }
  }
}

bool PeftCacheManager::is_leased_by(const BatchLease& lease, TaskId task) const {
  const std::size_t position = records_.at(task).lease_position;
  return position < lease.tasks().size() && lease.tasks()[position].task == task;
}

// Takes back the pins that no lease holds, and the claims.
void PeftCacheManager::undo_batch() noexcept {
  for (BatchTask& item : batch_) {
    if (!std::exchange(item.is_pinned, false)) {
      continue;
    }
    device_.unpin(item.task);
    if (item.is_claimed && device_.find(item.task)->state == EntryState::loading) {
      give_up_copy(Tier::device, item.task);
    }
  }
}

void PeftCacheManager::release_lease(const std::vector<BatchLease::LeasedTask>& tasks,
                                     void* stream) {
  // Before the lock: it may wait. Before anything is changed: it may throw.
  const std::shared_ptr<const PageUse> reads =
      tasks.empty() ? nullptr : device_.pool().device()->launched_work(stream);
  const Lock lock = enter();
  for (const BatchLease::LeasedTask& leased : tasks) {
    if (reads != nullptr) {
      device_.add_reserved_page_use(leased.task, reads);
    }
    device_.unpin(leased.task);
    --leased_pins_;
  }
  --num_open_leases_;
  board_->changed.notify_all();
}

// With one batch in flight the previous lease ends here; with more, there must be room for one.
PeftCacheManager::Lock PeftCacheManager::lock_for_batch(void* stream) {
  if (options_.max_inflight_batches == 1) {
    return lock_without_lease(stream);
  }
  Lock lock = enter();
  std::erase_if(open_leases_, [](const auto& lease) { return lease.expired(); });
  if (num_open_leases_ >= options_.max_inflight_batches) {
    throw InvalidArgumentError(std::to_string(num_open_leases_) +
                               " batch leases are open and max_inflight_batches is " +
                               std::to_string(options_.max_inflight_batches) +
                               ": close one before the next batch, or raise it");
  }
  return lock;
}

// Locks the manager at a moment when no lease holds a pin. A lease that is just being closed or
// destroyed by another thread is waited for; that thread needs the device, then this lock, and
// nothing else.
PeftCacheManager::Lock PeftCacheManager::lock_without_lease(void* stream) {
  for (;;) {
    std::shared_ptr<BatchLease> lease;  // outlives the lock: its end may take it
    Lock lock = enter();
    while (lease == nullptr && !open_leases_.empty()) {
      lease = open_leases_.back().lock();
      open_leases_.pop_back();
    }
    if (lease != nullptr) {
      lock.unlock();
      try {
        lease->close(stream);
      } catch (...) {
        lock.lock();
        open_leases_.push_back(lease);  // where it was: there is room
        board_->changed.notify_all();   // close() may be waiting for it
        throw;
      }
      continue;
    }
    if (num_open_leases_ == 0) {
      return lock;
    }
    board_->changed.wait(lock);  // then look again: somebody may have opened another one
  }
}

std::vector<TaskId> PeftCacheManager::open_lease_tasks() const {
  const Lock lock = enter();
  std::vector<TaskId> tasks;
  if (num_open_leases_ != 0) {
    for (const auto& [task, entry] : device_.entries()) {
      if (entry.pins != 0) {
        tasks.push_back(task);
      }
    }
  }
  return tasks;
}

}  // namespace pagedlora
