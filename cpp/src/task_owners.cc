#include "pagedlora/task_owners.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

[[noreturn]] void refuse(RequestId request, TaskId current, TaskId task) {
  throw RequestConflictError("request " + std::to_string(request.value) + " is alive with task " +
                             std::to_string(current.value) + " and cannot be added for task " +
                             std::to_string(task.value) +
                             "; mark it done first, or use another request id");
}

}  // namespace

std::set<RequestId> OwnedTask::owners(bool is_paused) const {
  std::set<RequestId> requests;
  for (const Life* life = first_; life != nullptr; life = life->next) {
    if (life->is_paused == is_paused) {
      requests.insert(life->request);
    }
  }
  return requests;
}

const TaskOwners::Life* TaskOwners::find(RequestId request) const {
  const auto found = lives_.find(request);
  return found == lives_.end() || found->second.task == nullptr ? nullptr : &found->second;
}

TaskOwners::Life* TaskOwners::find(RequestId request) {
  return const_cast<Life*>(std::as_const(*this).find(request));
}

std::optional<TaskId> TaskOwners::task_of(RequestId request) const {
  if (const Life* life = find(request)) {
    return life->task->id();
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

bool TaskOwners::is_active(RequestId request) const {
  const Life* life = find(request);
  return life != nullptr && !life->is_paused;
}

bool TaskOwners::has_started(RequestId request) const {
  const Life* life = find(request);
  return life != nullptr && life->started;
}

void TaskOwners::check_add(RequestId request, TaskId task) const {
  const std::optional<TaskId> current = task_of(request);
  if (current && *current != task) {
    refuse(request, *current, task);
  }
}

TaskOwners::Added TaskOwners::add(RequestId request, OwnedTask& task, bool started) {
  if (failure_of(request) != nullptr) {
    check_add(request, task.id());
    return Added::already;
  }
  const auto [found, is_newcomer] = find_or_begin(request);  // all that may run out of memory
  Life& life = *found;
  if (is_newcomer || life.task == nullptr) {
    life = {request, &task, nullptr, nullptr, started, false};
    enter(life, task);
    return Added::newly;
  }
  if (life.task != &task) {
    refuse(request, life.task->id(), task.id());
  }
  if (!life.is_paused) {
    return Added::already;
  }
  life.is_paused = false;
  --task.num_paused_;
  ++task.num_active_;
  ++task.num_started_;
  return Added::resumed;
}

// Whether the life is new. It is of nobody then, as it is after it was revoked.
std::pair<TaskOwners::Life*, bool> TaskOwners::find_or_begin(RequestId request) {
  if (spares_.empty()) {
    const auto [found, is_new] = lives_.try_emplace(request);
    return {&found->second, is_new};
  }
  spares_.back().key() = request;
  auto inserted = lives_.insert(std::move(spares_.back()));
  if (inserted.inserted) {
    spares_.pop_back();
  } else {
    spares_.back() = std::move(inserted.node);
  }
  return {&inserted.position->second, inserted.inserted};
}

void TaskOwners::enter(Life& life, OwnedTask& task) {
  if (!task.is_owned()) {
    task.owned_since_ = ++adds_;
  } else {
    life.next = task.first_;
    life.next->previous = &life;
  }
  task.first_ = &life;
  ++task.num_active_;
  task.num_started_ += life.started ? 1U : 0U;
}

// Its task has one owner less, and the life has no task.
void TaskOwners::leave(OwnedTask& task, Life& life) {
  if (life.is_paused) {
    --task.num_paused_;
  } else {
    --task.num_active_;
    task.num_started_ -= life.started ? 1U : 0U;
  }
  (life.previous == nullptr ? task.first_ : life.previous->next) = life.next;
  if (life.next != nullptr) {
    life.next->previous = life.previous;
  }
  life = {life.request};
}

void TaskOwners::end(Lives::iterator found) {
  if (found->second.task != nullptr) {
    leave(*found->second.task, found->second);
  }
  if (spares_.size() < kMaxSpares) {
    spares_.push_back(lives_.extract(found));
  } else {
    lives_.erase(found);
  }
}

void TaskOwners::end_all(OwnedTask& task) {
  while (task.first_ != nullptr) {
    end(lives_.find(task.first_->request));
  }
}

bool TaskOwners::was_revoked(RequestId request) const {
  const auto found = lives_.find(request);
  return found != lives_.end() && found->second.task == nullptr;
}

bool TaskOwners::start(RequestId request) {
  Life* life = find(request);
  if (life == nullptr || life->is_paused || life->started) {
    return false;
  }
  life->started = true;
  ++life->task->num_started_;
  return true;
}

std::optional<TaskOwners::Released> TaskOwners::pause(RequestId request) {
  Life* life = find(request);
  if (life == nullptr || life->is_paused) {
    return std::nullopt;
  }
  OwnedTask& task = *life->task;
  --task.num_active_;
  ++task.num_paused_;
  task.num_started_ -= life->started ? 1U : 0U;
  life->started = true;
  life->is_paused = true;
  return Released{&task, task.num_active_ == 0, false};
}

std::optional<TaskOwners::Released> TaskOwners::done(RequestId request) {
  if (!failures_.empty()) {
    failures_.erase(request);
  }
  const auto found = lives_.find(request);
  if (found == lives_.end()) {
    return std::nullopt;
  }
  OwnedTask* const task = found->second.task;
  const bool was_active = !found->second.is_paused;
  end(found);
  if (task == nullptr) {
    return std::nullopt;
  }
  return Released{task, was_active && task->num_active_ == 0, !task->is_owned()};
}

void TaskOwners::fail(OwnedTask& task, const std::exception_ptr& error) {
  decltype(failures_) failures;  // made before anything changes
  for (const Life* life = task.first_; life != nullptr; life = life->next) {
    failures.emplace(life->request, Failure{task.id(), error});
  }
  failures_.reserve(failures_.size() + failures.size());
  end_all(task);
  failures_.merge(failures);
}

void TaskOwners::revoke(OwnedTask& task) {
  if (!task.is_revocable()) {
    throw std::logic_error("task " + std::to_string(task.id().value) +
                           " has no owners, or some that cannot be revoked");
  }
  while (task.first_ != nullptr) {
    leave(task, *task.first_);
  }
}

void TaskOwners::visit(const std::function<void(const OwnedTask&)>& visitor) const {
  for (const auto& [request, life] : lives_) {
    if (life.task != nullptr && life.task->first_ == &life) {
      visitor(*life.task);
    }
  }
}

void TaskOwners::check_life(const OwnedTask& task, const Life& life) const {
  const bool is_linked = (life.previous == nullptr ? task.first_ : life.previous->next) == &life;
  if (find(life.request) != &life || life.task != &task || !is_linked ||
      failures_.contains(life.request)) {
    throw std::logic_error("request " + std::to_string(life.request.value) +
                           " owns two tasks, is in two sets, or is remembered for another");
  }
}

void TaskOwners::check_task(const OwnedTask& task) const {
  const std::string label = "task " + std::to_string(task.id().value);
  std::size_t num_active = 0;
  std::size_t num_paused = 0;
  std::size_t num_started = 0;
  for (const Life* life = task.first_; life != nullptr; life = life->next) {
    check_life(task, *life);
    ++(life->is_paused ? num_paused : num_active);
    num_started += life->started && !life->is_paused ? 1U : 0U;
  }
  if (num_active != task.num_active_ || num_paused != task.num_paused_ ||
      num_started != task.num_started_) {
    throw std::logic_error(label + " miscounts its active, paused or started requests");
  }
}

void TaskOwners::check_invariants() const {
  std::size_t num_requests = 0;
  visit([&](const OwnedTask& task) {
    check_task(task);
    num_requests += task.num_owners();
  });
  const auto is_revoked = [](const auto& item) { return item.second.task == nullptr; };
  if (num_requests + static_cast<std::size_t>(std::ranges::count_if(lives_, is_revoked)) !=
      lives_.size()) {
    throw std::logic_error("a request is in two owner sets, or remembered without owning");
  }
}

}  // namespace pagedlora
