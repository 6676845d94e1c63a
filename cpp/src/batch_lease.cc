#include "pagedlora/batch_lease.h"

#include <mutex>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {

const BatchLease::LeasedTask* BatchLease::find(RequestId request) const {
  check_open();
  const auto found = task_of_request_.find(request);
  return found == task_of_request_.end() ? nullptr : &tasks_[found->second];
}

void BatchLease::check_open() const { static_cast<void>(hold_open()); }

std::shared_lock<std::shared_mutex> BatchLease::hold_open() const {
  std::shared_lock lock(mutex_);
  if (!release_) {
    throw LeaseClosedError(
        "the batch lease is closed: its adapters may have been evicted; ensure the batch again");
  }
  return lock;
}

bool BatchLease::is_open() const {
  const std::shared_lock lock(mutex_);
  return static_cast<bool>(release_);
}

void BatchLease::close() noexcept {
  Release release;
  {
    const std::scoped_lock lock(mutex_);
    release = std::exchange(release_, nullptr);
  }
  if (release) {
    release(tasks_);
  }
}

}  // namespace pagedlora
