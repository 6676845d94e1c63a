#include "pagedlora/task_owners.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {

std::optional<TaskId> TaskOwners::task_of(RequestId request) const {
  if (const auto found = lives_.find(request); found != lives_.end()) {
    return found->second.task;
  }
  const Failure* failure = failure_of(request);
  return failure == nullptr ? std::nullopt : std::optional(failure->task);
}

const TaskOwners::Failure* TaskOwners::failure_of(RequestId request) const {
  if (failures_.empty()) {
    return nullptr;
  }
  const auto found = failures_.find(request);
  return found == failures_.end() ? nullptr : &found->second;
}

const TaskOwners::Sets* TaskOwners::sets_of(TaskId task) const {
  const auto found = by_task_.find(task);
  return found == by_task_.end() ? nullptr : &found->second;
}

bool TaskOwners::has_active(TaskId task) const {
  const Sets* sets = sets_of(task);
  return sets != nullptr && !sets->active.empty();
}

bool TaskOwners::is_active(RequestId request) const {
  const auto found = lives_.find(request);
  return found != lives_.end() && !found->second.is_paused;
}

bool TaskOwners::has_started(RequestId request) const {
  const auto found = lives_.find(request);
  return found != lives_.end() && found->second.started;
}

void TaskOwners::check_add(RequestId request, TaskId task) const {
  const std::optional<TaskId> current = task_of(request);
  if (current && *current != task) {
    throw RequestConflictError("request " + std::to_string(request.value) + " is alive with task " +
                               std::to_string(current->value) + " and cannot be added for task " +
                               std::to_string(task.value) +
                               "; mark it done first, or use another request id");
  }
}

TaskOwners::Added TaskOwners::add(RequestId request, TaskId task, bool started, bool* first) {
  if (first != nullptr) {
    *first = false;
  }
  if (failure_of(request) != nullptr) {
    check_add(request, task);
    return Added::already;
  }
  const auto [life, is_newcomer] = lives_.try_emplace(request, Life{task, started, false});
  if (!is_newcomer) {
    check_add(request, task);
    if (!life->second.is_paused) {
      return Added::already;
    }
    Sets& sets = by_task_.at(task);
    sets.active.insert(sets.paused.extract(request));
    ++sets.num_started;
    life->second.is_paused = false;
    return Added::resumed;
  }
  bool is_new = false;
  try {
    const auto [sets, inserted] = by_task_.try_emplace(task);
    is_new = inserted;
    sets->second.active.insert(request);
    sets->second.num_started += started ? 1U : 0U;
    sets->second.owned_since = is_new ? ++adds_ : sets->second.owned_since;
  } catch (...) {  // out of memory
    lives_.erase(life);
    if (is_new) {
      by_task_.erase(task);
    }
    throw;
  }
  if (first != nullptr) {
    *first = is_new;
  }
  return Added::newly;
}

bool TaskOwners::start(RequestId request) {
  const auto found = lives_.find(request);
  if (found == lives_.end() || found->second.is_paused || found->second.started) {
    return false;
  }
  found->second.started = true;
  ++by_task_.at(found->second.task).num_started;
  return true;
}

bool TaskOwners::drop_if_empty(ByTask::iterator known) {
  const bool is_empty = known->second.active.empty() && known->second.paused.empty();
  if (is_empty) {
    by_task_.erase(known);
  }
  return is_empty;
}

std::optional<TaskOwners::Released> TaskOwners::pause(RequestId request) {
  const auto found = lives_.find(request);
  if (found == lives_.end() || found->second.is_paused) {
    return std::nullopt;
  }
  Life& life = found->second;
  Sets& sets = by_task_.at(life.task);
  sets.paused.insert(sets.active.extract(request));
  sets.num_started -= life.started ? 1U : 0U;
  life.started = true;
  life.is_paused = true;
  return Released{life.task, sets.active.empty(), false};
}

std::optional<TaskOwners::Released> TaskOwners::done(RequestId request) {
  if (!failures_.empty()) {
    failures_.erase(request);
  }
  const auto found = lives_.find(request);
  if (found == lives_.end()) {
    return std::nullopt;
  }
  const Life life = found->second;
  lives_.erase(found);
  const auto known = by_task_.find(life.task);
  Sets& sets = known->second;
  if (life.is_paused) {
    sets.paused.erase(request);
  } else {
    sets.active.erase(request);
    sets.num_started -= life.started ? 1U : 0U;
  }
  const bool last_active = !life.is_paused && sets.active.empty();
  return Released{life.task, last_active, drop_if_empty(known)};
}

void TaskOwners::fail(TaskId task, const std::exception_ptr& error) {
  const auto found = by_task_.find(task);
  if (found == by_task_.end()) {
    return;
  }
  decltype(failures_) failures;  // made before anything changes
  for (const std::set<RequestId>* owners : {&found->second.active, &found->second.paused}) {
    for (const RequestId request : *owners) {
      failures.emplace(request, Failure{task, error});
    }
  }
  failures_.reserve(failures_.size() + failures.size());
  for (const auto& [request, failure] : failures) {
    lives_.erase(request);
  }
  failures_.merge(failures);
  by_task_.erase(found);
}

void TaskOwners::revoke(TaskId task) {
  const auto found = by_task_.find(task);
  if (found == by_task_.end() || !found->second.is_revocable()) {
    throw std::logic_error("task " + std::to_string(task.value) +
                           " has no owners, or some that cannot be revoked");
  }
  for (const RequestId request : found->second.active) {
    lives_.erase(request);
  }
  by_task_.erase(found);
}

void TaskOwners::check_life(TaskId task, RequestId request, bool is_paused) const {
  const auto found = lives_.find(request);
  if (found == lives_.end() || found->second.task != task || found->second.is_paused != is_paused ||
      failures_.contains(request)) {
    throw std::logic_error("request " + std::to_string(request.value) +
                           " owns two tasks, is in two sets, or is remembered for another");
  }
}

void TaskOwners::check_invariants() const {
  std::size_t num_requests = 0;
  for (const auto& [task, sets] : by_task_) {
    if (sets.active.empty() && sets.paused.empty()) {
      throw std::logic_error("task " + std::to_string(task.value) + " keeps empty owner sets");
    }
    num_requests += sets.active.size() + sets.paused.size();
    std::size_t num_started = 0;
    for (const RequestId request : sets.active) {
      check_life(task, request, false);
      num_started += lives_.at(request).started ? 1U : 0U;
    }
    for (const RequestId request : sets.paused) {
      check_life(task, request, true);
    }
    if (num_started != sets.num_started) {
      throw std::logic_error("task " + std::to_string(task.value) +
                             " miscounts its started requests");
    }
  }
  if (num_requests != lives_.size()) {
    throw std::logic_error("a request is in two owner sets, or remembered without owning");
  }
}

}  // namespace pagedlora
