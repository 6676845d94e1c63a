// Which requests use which task: the owner sets that pins and eviction classes derive from.
//
// Per task two sets of request ids, active A and paused P; a request is in at most one, and of
// one task. The task of a request is remembered from add to done, whatever its caller says later.
//
//   call        r in neither     r in A          r in P
//   add(r)      A + r            nothing         A + r, P - r   (another task: conflict)
//   pause(r)    nothing          A - r, P + r    nothing
//   done(r)     nothing          A - r           P - r
//
// Empty sets are not kept. Thread-compatible: the caller holds the manager's lock.
#pragma once

#include <optional>
#include <set>
#include <unordered_map>

#include "pagedlora/ids.h"

namespace pagedlora {

class TaskOwners {
 public:
  struct Sets {
    std::set<RequestId> active;
    std::set<RequestId> paused;
  };
  enum class Added { newly, resumed, already };

  std::optional<TaskId> task_of(RequestId request) const;

  // nullptr: the task has no owner.
  const Sets* sets_of(TaskId task) const;
  bool has_active(TaskId task) const;
  bool has_any(TaskId task) const { return sets_of(task) != nullptr; }

  // Throws RequestConflictError if the request lives with another task.
  void check_add(RequestId request, TaskId task) const;
  Added add(RequestId request, TaskId task);  // throws as check_add

  // The request's task if the call changed something.
  std::optional<TaskId> pause(RequestId request);
  std::optional<TaskId> done(RequestId request);

  const std::unordered_map<TaskId, Sets>& by_task() const { return by_task_; }

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

 private:
  void drop_if_empty(TaskId task);

  std::unordered_map<RequestId, TaskId> task_by_request_;
  std::unordered_map<TaskId, Sets> by_task_;
};

}  // namespace pagedlora
