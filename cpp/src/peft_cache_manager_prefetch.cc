// What is brought in before anybody needs it.
#include <utility>

#include "internal/load_jobs.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora {

void PeftCacheManager::prefetch(std::span<const TaskId> window) {
  const Lock lock = enter();
  check_open();
  replace_window(window);
  bool host_has_room = true;
  bool device_has_room = true;
  // A copy: bringing one in may make the window forget another one.
  const std::vector<TaskId> tasks = window_;
  for (const TaskId task : tasks) {
    const auto found = records_.find(task);
    if (found == records_.end()) {
      continue;
    }
    TaskRecord& record = found->second;
    if (record.host_entry == nullptr) {
      host_has_room = host_has_room && prefetch_into_host(task, record);
    } else if (record.host_entry->state == EntryState::resident && record.device_entry == nullptr) {
      device_has_room = device_has_room && prefetch_into_device(task, record);
    }
  }
}

void PeftCacheManager::replace_window(std::span<const TaskId> window) {
  std::vector<TaskId> next;
  next.reserve(window.size());  // all that may fail
  for (const TaskId task : window_) {
    if (const auto found = records_.find(task); found != records_.end()) {
      found->second.window_position = kNoDistance;
    }
  }
  const std::vector<TaskId> previous = std::exchange(window_, std::move(next));
  for (const TaskId task : window) {
    const auto found = records_.find(task);
    if (found != records_.end() && found->second.window_position == kNoDistance) {
      found->second.window_position = window_.size();
      window_.push_back(task);
    }
  }
  for (const std::vector<TaskId>* tasks : {&previous, &std::as_const(window_)}) {
    for (const TaskId task : *tasks) {
      update_class(records_.at(task));
    }
  }
}

// False if the host tier has no room that the task may take.
bool PeftCacheManager::prefetch_into_host(TaskId task, TaskRecord& record) {
  if (!device_.is_resident(task) && record.plan->source() == nullptr) {
    return true;  // nothing to bring it from
  }
  const std::size_t pages = layout_of(record)->num_pages();
  if (pages > device_.pool().num_pages()) {
    return true;  // no request can use it
  }
  if (host_.shortage_for_waiting(pages, record.window_position)) {
    return false;
  }
  bring_into_host(task, record.plan, false);
  return true;
}

bool PeftCacheManager::prefetch_into_device(TaskId task, TaskRecord& record) {
  const std::size_t pages = record.layout->num_pages();
  if (device_.shortage_for_waiting(pages, record.window_position)) {
    return false;
  }
  make_room(Tier::device, pages);
  claim_on_device(task, record);
  start_device_fill(task, record);
  return true;
}

}  // namespace pagedlora
