#include "pagedlora/task_owners.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {

std::optional<TaskId> TaskOwners::task_of(RequestId request) const {
  const auto found = task_by_request_.find(request);
  return found == task_by_request_.end() ? std::nullopt : std::optional(found->second);
}

const TaskOwners::Sets* TaskOwners::sets_of(TaskId task) const {
  const auto found = by_task_.find(task);
  return found == by_task_.end() ? nullptr : &found->second;
}

bool TaskOwners::has_active(TaskId task) const {
  const Sets* sets = sets_of(task);
  return sets != nullptr && !sets->active.empty();
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

TaskOwners::Added TaskOwners::add(RequestId request, TaskId task) {
  check_add(request, task);
  const auto known = by_task_.find(task);
  if (known != by_task_.end() && known->second.active.contains(request)) {
    return Added::already;
  }
  if (known != by_task_.end() && known->second.paused.contains(request)) {
    known->second.active.insert(known->second.paused.extract(request));
    return Added::resumed;
  }
  Sets& sets = by_task_[task];
  try {
    sets.active.insert(request);
    task_by_request_.emplace(request, task);
  } catch (...) {  // out of memory
    sets.active.erase(request);
    drop_if_empty(task);
    throw;
  }
  return Added::newly;
}

void TaskOwners::drop_if_empty(TaskId task) {
  const auto known = by_task_.find(task);
  if (known->second.active.empty() && known->second.paused.empty()) {
    by_task_.erase(known);
  }
}

std::optional<TaskId> TaskOwners::pause(RequestId request) {
  const std::optional<TaskId> task = task_of(request);
  if (!task) {
    return std::nullopt;
  }
  Sets& sets = by_task_.at(*task);
  auto node = sets.active.extract(request);
  if (node.empty()) {
    return std::nullopt;
  }
  sets.paused.insert(std::move(node));
  return task;
}

std::optional<TaskId> TaskOwners::done(RequestId request) {
  const std::optional<TaskId> task = task_of(request);
  if (!task) {
    return std::nullopt;
  }
  Sets& sets = by_task_[*task];
  sets.active.erase(request);
  sets.paused.erase(request);
  drop_if_empty(*task);
  task_by_request_.erase(request);
  return task;
}

void TaskOwners::check_invariants() const {
  std::size_t num_requests = 0;
  for (const auto& [task, sets] : by_task_) {
    if (sets.active.empty() && sets.paused.empty()) {
      throw std::logic_error("task " + std::to_string(task.value) + " keeps empty owner sets");
    }
    num_requests += sets.active.size() + sets.paused.size();
    for (const std::set<RequestId>* owners : {&sets.active, &sets.paused}) {
      for (const RequestId request : *owners) {
        if (task_of(request) != task) {
          throw std::logic_error("request " + std::to_string(request.value) +
                                 " owns two tasks or is remembered for another");
        }
      }
    }
  }
  if (num_requests != task_by_request_.size()) {
    throw std::logic_error("a request is in two owner sets, or remembered without owning");
  }
}

}  // namespace pagedlora
