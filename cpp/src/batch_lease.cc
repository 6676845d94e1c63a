#include "pagedlora/batch_lease.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {

void BatchLease::sort_requests() {
  std::ranges::sort(requests_, {}, &LeasedRequest::request);
  const auto repeated = std::ranges::unique(requests_, {}, &LeasedRequest::request);
  requests_.erase(repeated.begin(), repeated.end());
}

void BatchLease::reopen(Release release) {
  const std::scoped_lock lock(mutex_);
  tasks_.clear();
  requests_.clear();
  errors_.clear();
  release_ = std::move(release);
}

const BatchLease::LeasedRequest* BatchLease::position_of(RequestId request) const {
  const auto found = std::ranges::lower_bound(requests_, request, {}, &LeasedRequest::request);
  return found == requests_.end() || found->request != request ? nullptr : &*found;
}

const BatchLease::LeasedTask* BatchLease::find(RequestId request) const {
  check_open();
  const LeasedRequest* found = position_of(request);
  return found == nullptr ? nullptr : &tasks_[found->position];
}

void BatchLease::check_open() const { static_cast<void>(hold_open()); }

std::shared_lock<std::shared_mutex> BatchLease::hold_open() const {
  process_.check("this batch lease");
  std::shared_lock lock(mutex_);
  if (!release_) {
    throw LeaseClosedError(
        "the batch lease is closed: its adapters may have been evicted; ensure the batch again");
  }
  return lock;
}

bool BatchLease::is_open() const {
  if (!process_.is_here()) {
    return false;
  }
  const std::shared_lock lock(mutex_);
  return static_cast<bool>(release_);
}

void BatchLease::close(void* stream) {
  if (!process_.is_here()) {
    return;
  }
  Release release;
  {
    const std::scoped_lock lock(mutex_);
    release = std::exchange(release_, nullptr);
  }
  if (!release) {
    return;
  }
  try {
    release(tasks_, stream);
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    release_ = std::move(release);
    throw;
  }
}

}  // namespace pagedlora
