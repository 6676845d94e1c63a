// Which requests use which task: the owner sets that pins and eviction classes derive from.
//
// Per task two sets of request ids, active A and paused P; a request is in at most one, and of
// one task. The task of a request is remembered from add to done, whatever its caller says later.
// When a load fails, the task's owners become failed (F): they own nothing any more, and keep their
// error until they are done.
//
//   call            r in none    r in A          r in P          r in F
//   add(r)          A + r        nothing         A + r, P - r    nothing   (another task: conflict)
//   pause(r)        nothing      A - r, P + r    nothing         nothing
//   done(r)         nothing      A - r           P - r           F - r
//   fail(task)      -            F + r, A - r    F + r, P - r    nothing
//   revoke(task)    -            A - r           refused         -
//
// A request has started when its first chunk was in a batch. Owners of a task of which none has
// started, and none is paused, can be revoked: they wait again.
//
// Empty sets are not kept. Thread-compatible: the caller holds the manager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
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
    std::size_t num_started = 0;    // of the active ones
    std::uint64_t owned_since = 0;  // number of the add that made the first owner

    bool is_revocable() const { return paused.empty() && num_started == 0; }
  };
  struct Failure {
    TaskId task;
    std::exception_ptr error;
  };
  enum class Added { newly, resumed, already };
  struct Released {
    TaskId task;
    bool last_active = false;  // the request was the last active owner
    bool last = false;         // it was the last owner
  };

  std::optional<TaskId> task_of(RequestId request) const;  // of an owner or a failed one
  const Failure* failure_of(RequestId request) const;      // nullptr: not failed

  // nullptr: the task has no owner.
  const Sets* sets_of(TaskId task) const;
  bool has_active(TaskId task) const;
  bool has_any(TaskId task) const { return sets_of(task) != nullptr; }
  bool is_active(RequestId request) const;
  bool has_started(RequestId request) const;  // an owner

  // Throws RequestConflictError if the request lives with another task.
  void check_add(RequestId request, TaskId task) const;
  // Throws as check_add. `first`, if given: whether the task had no owner before.
  Added add(RequestId request, TaskId task, bool started = false, bool* first = nullptr);
  bool start(RequestId request);  // whether this made an active owner one that has started

  // What the task lost by it; nothing if the call changed no owner set.
  std::optional<Released> pause(RequestId request);
  std::optional<Released> done(RequestId request);

  void fail(TaskId task, const std::exception_ptr& error);
  void revoke(TaskId task);  // its sets must be revocable (std::logic_error)

  const std::unordered_map<TaskId, Sets>& by_task() const { return by_task_; }

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

 private:
  struct Life {
    TaskId task;
    bool started = false;
    bool is_paused = false;
  };

  using ByTask = std::unordered_map<TaskId, Sets>;

  bool drop_if_empty(ByTask::iterator known);
  void check_life(TaskId task, RequestId request, bool is_paused) const;

  std::unordered_map<RequestId, Life> lives_;
  ByTask by_task_;
  std::unordered_map<RequestId, Failure> failures_;
  std::uint64_t adds_ = 0;
};

}  // namespace pagedlora
