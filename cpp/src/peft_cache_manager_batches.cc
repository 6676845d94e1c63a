// How PeftCacheManager brings batches to the device and holds them there.
#include <algorithm>
#include <utility>

#include "internal/page_runs.h"
#include "internal/stopwatch.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

std::shared_ptr<BatchLease> PeftCacheManager::ensure_batch(std::span<const RequestId> requests,
                                                           bool reset_device_cache) {
  // Made before the lock is taken: when something below throws, its destructor takes the lock.
  auto lease = std::make_shared<BatchLease>(
      config_, [this](const std::vector<BatchLease::LeasedTask>& tasks) { release_lease(tasks); });
  const std::unique_lock lock = lock_without_lease();
  check_open();
  const std::vector<TaskId> tasks = resolve_batch(requests, *lease);
  try {
    claim_batch(tasks, reset_device_cache);
    fill_lease(tasks, requests, *lease);
  } catch (...) {
    undo_claims(tasks, *lease);
    throw;
  }
  open_lease_ = lease;
  return lease;
}

// Copies what is absent; a task whose copy fails is left out, and its requests get the error.
void PeftCacheManager::fill_lease(const std::vector<TaskId>& tasks,
                                  std::span<const RequestId> requests, BatchLease& lease) {
  std::unordered_map<TaskId, std::exception_ptr> failed;
  std::unordered_map<TaskId, std::size_t> position;
  for (const TaskId task : tasks) {
    if (!device_.is_resident(task)) {
      try {
        copy_to_device(task);
      } catch (...) {
        failed.emplace(task, std::current_exception());
        continue;
      }
    }
    position.emplace(task, lease.tasks().size());
    lease.add_task({task, pages_of(device_, task), records_.at(task).layout});
    ++leased_pins_;
  }
  for (const RequestId request : requests) {
    const std::optional<TaskId> task = owners_.task_of(request);
    if (!task || lease.errors().contains(request)) {
      continue;
    }
    if (const auto error = failed.find(*task); error != failed.end()) {
      lease.add_error(request, error->second);
    } else {
      lease.add_request(request, position.at(*task));
    }
  }
}

// Takes back the claims and pins of tasks that the lease does not hold yet.
void PeftCacheManager::undo_claims(const std::vector<TaskId>& tasks,
                                   const BatchLease& lease) noexcept {
  for (const TaskId task : tasks) {
    const LoraCache::Entry* entry = device_.find(task);
    const bool is_leased = std::ranges::find(lease.tasks(), task, &BatchLease::LeasedTask::task) !=
                           lease.tasks().end();
    if (entry == nullptr || entry->pins == 0 || is_leased) {
      continue;
    }
    device_.unpin(task);
    if (entry->state == EntryState::loading) {
      device_.fail(task);
    }
  }
}

// The distinct tasks of the requests, in call order; requests that cannot be served get their
// error.
std::vector<TaskId> PeftCacheManager::resolve_batch(std::span<const RequestId> requests,
                                                    BatchLease& lease) {
  std::vector<TaskId> tasks;
  std::set<TaskId> seen;
  for (const RequestId request : requests) {
    const std::optional<TaskId> task = owners_.task_of(request);
    const bool active = task && owners_.sets_of(*task)->active.contains(request);
    if (!active) {
      lease.add_error(request, std::make_exception_ptr(InvalidArgumentError(
                                   "request " + std::to_string(request.value) +
                                   (task ? " is paused" : " was never added") +
                                   ": call add_request_peft before ensure_batch")));
    } else if (seen.insert(*task).second) {
      tasks.push_back(*task);
    }
  }
  return tasks;
}

// Pins what is there and claims pages for the rest: all of it or, with an error, nothing.
void PeftCacheManager::claim_batch(const std::vector<TaskId>& tasks, bool reset_device_cache) {
  std::size_t needed = 0;
  std::size_t kept = 0;
  for (const TaskId task : tasks) {
    const LoraCache::Entry* entry = device_.find(task);
    needed += entry == nullptr ? records_.at(task).layout->num_pages() : 0;
    kept += entry != nullptr && entry->pins == 0 ? entry->pages.size() : 0;
  }
  if (const std::optional<Shortage> shortage = device_.shortage(needed, kept)) {
    device_.refuse(*shortage);
  }
  if (reset_device_cache) {
    device_.demote_all();
  }
  for (const TaskId task : tasks) {
    if (device_.is_resident(task)) {
      ++stats_.device.hits;
      device_.pin(task);
      device_.set_class(task, class_of(task));
    }
  }
  make_room(device_, needed);
  for (const TaskId task : tasks) {
    if (device_.is_resident(task)) {
      device_.use(task, ++uses_);
    } else {
      ++stats_.device.misses;
      device_.claim(task, records_.at(task).layout->num_pages(), ++uses_);
      device_.pin(task);
    }
  }
}

void PeftCacheManager::copy_to_device(TaskId task) {
  const internal::Stopwatch stopwatch(stats_.device.load_seconds);
  try {
    device_.pool().device().copy_from_host(
        internal::page_runs(pages_of(host_, task), pages_of(device_, task)));
  } catch (...) {
    device_.unpin(task);
    device_.fail(task);
    ++stats_.failed_loads;
    throw;
  }
  device_.set_class(task, class_of(task));
  device_.publish(task);
  stats_.device.bytes_loaded += records_.at(task).layout->payload_bytes();
}

void PeftCacheManager::release_lease(const std::vector<BatchLease::LeasedTask>& tasks) noexcept {
  const std::scoped_lock lock(mutex_);
  for (const BatchLease::LeasedTask& leased : tasks) {
    device_.unpin(leased.task);
    --leased_pins_;
  }
  lease_released_.notify_all();
}

// Locks the manager at a moment when no lease holds a pin. A lease that is just being closed or
// destroyed by another thread is waited for; that thread needs nothing but this lock.
std::unique_lock<std::mutex> PeftCacheManager::lock_without_lease() {
  for (;;) {
    std::shared_ptr<BatchLease> lease;  // outlives the lock: its destructor may take it
    std::unique_lock lock(mutex_);
    lease = open_lease_.lock();
    open_lease_.reset();
    if (lease == nullptr && leased_pins_ == 0) {
      return lock;
    }
    if (lease == nullptr) {
      lease_released_.wait(lock);  // then look again: somebody may have opened another one
      continue;
    }
    lock.unlock();
    lease->close();
  }
}

}  // namespace pagedlora
