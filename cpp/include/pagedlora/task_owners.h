// Which requests use which task: the owner sets that pins and eviction classes derive from.
//
// Per task two sets of request ids, active A and paused P; a request is in at most one, and of
// one task. The task of a request is remembered from add to done, whatever its caller says later.
// When a load fails, the task's owners become failed (F): they own nothing any more, and keep their
// error until they are done. Owners that are revoked (R) own nothing either: they wait, and may be
// added for any task.
//
//   call            r in none    r in A          r in P          r in F       r in R
//   add(r)          A + r        nothing         A + r, P - r    nothing      A + r, R - r
//   pause(r)        nothing      A - r, P + r    nothing         nothing      nothing
//   done(r)         nothing      A - r           P - r           F - r        R - r
//   fail(task)      -            F + r, A - r    F + r, P - r    nothing      -
//   revoke(task)    -            R + r, A - r    refused         -            -
//
// Adding an owner for another task is a conflict. A request has started when its first chunk was in
// a batch. Owners of a task of which none has started, and none is paused, can be revoked.
//
// Each task's sets are a list through its requests that starts in an OwnedTask, which belongs to the
// caller: adding and taking away look up the request, and nothing else.
//
// Thread-compatible: the caller holds the manager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pagedlora/ids.h"

namespace pagedlora {

// What a task's owners are known by. Whoever has it keeps it alive while the task has owners.
class OwnedTask {
 public:
  explicit OwnedTask(TaskId id) : id_(id) {}
  OwnedTask(const OwnedTask&) = delete;
  OwnedTask& operator=(const OwnedTask&) = delete;

  TaskId id() const { return id_; }
  std::set<RequestId> active() const { return owners(false); }
  std::set<RequestId> paused() const { return owners(true); }
  std::size_t num_active() const { return num_active_; }
  std::size_t num_paused() const { return num_paused_; }
  std::size_t num_owners() const { return num_active() + num_paused(); }
  std::size_t num_started() const { return num_started_; }  // of the active ones
  std::uint64_t owned_since() const {
    return owned_since_;
  }  // number of the add of the first owner
  bool is_owned() const { return first_ != nullptr; }
  bool is_revocable() const { return is_owned() && num_paused_ == 0 && num_started_ == 0; }

 private:
  friend class TaskOwners;
  struct Life {  // of a request that owns the task, or did until it was revoked
    RequestId request;
    OwnedTask* task = nullptr;  // nullptr: revoked
    Life* previous = nullptr;
    Life* next = nullptr;
    bool started = false;
    bool is_paused = false;
  };

  std::set<RequestId> owners(bool is_paused) const;

  TaskId id_;
  Life* first_ = nullptr;
  std::uint32_t num_active_ = 0;
  std::uint32_t num_paused_ = 0;
  std::uint32_t num_started_ = 0;
  std::uint64_t owned_since_ = 0;
};

class TaskOwners {
 public:
  struct Failure {
    TaskId task;
    std::exception_ptr error;
  };
  enum class Added { newly, resumed, already };
  struct Released {
    OwnedTask* task;
    bool last_active = false;  // the request was the last active owner
    bool last = false;         // it was the last owner
  };

  TaskOwners() { spares_.reserve(kMaxSpares); }
  TaskOwners(const TaskOwners&) = delete;
  TaskOwners& operator=(const TaskOwners&) = delete;

  std::optional<TaskId> task_of(RequestId request) const;  // of an owner or a failed one
  const Failure* failure_of(RequestId request) const;      // nullptr: not failed
  bool is_active(RequestId request) const;
  bool has_started(RequestId request) const;  // an owner
  bool was_revoked(RequestId request) const;  // and neither added nor done since

  // Throws RequestConflictError if the request lives with another task.
  void check_add(RequestId request, TaskId task) const;
  // Throws as check_add; has changed nothing if it throws.
  Added add(RequestId request, OwnedTask& task, bool started = false);
  bool start(RequestId request);  // whether this made an active owner one that has started

  // What the task lost by it; nothing if the call changed no owner set. They need no memory.
  std::optional<Released> pause(RequestId request);
  std::optional<Released> done(RequestId request);

  void fail(OwnedTask& task, const std::exception_ptr& error);
  void revoke(OwnedTask& task);  // it must be revocable (std::logic_error)

  // Every task that has owners once, in no order that means anything.
  void visit(const std::function<void(const OwnedTask&)>& visitor) const;

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

 private:
  using Life = OwnedTask::Life;
  using Lives = std::unordered_map<RequestId, Life>;
  static constexpr std::size_t kMaxSpares = 64;

  const Life* find(RequestId request) const;  // of an owner
  Life* find(RequestId request);
  void enter(Life& life, OwnedTask& task);
  std::pair<Life*, bool> find_or_begin(RequestId request);
  static void leave(OwnedTask& task, Life& life);
  void end(Lives::iterator life);
  void end_all(OwnedTask& task);
  void check_task(const OwnedTask& task) const;
  void check_life(const OwnedTask& task, const Life& life) const;

  Lives lives_;
  std::vector<Lives::node_type> spares_;  // room for lives that begin: at most kMaxSpares
  std::unordered_map<RequestId, Failure> failures_;
  std::uint64_t adds_ = 0;
};

}  // namespace pagedlora
