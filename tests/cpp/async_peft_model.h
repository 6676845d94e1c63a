// What the asynchronous PeftCacheManager should do, as maps: who owns what, what is where and how far,
// who is given up next, and in which order.
//
// The machine runs it beside the manager. Loads end when they end: the model is told which endings the
// manager was allowed to take over, and follows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "async_peft_tiers.h"
#include "pagedlora/ids.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_model.h"

namespace pagedlora::testing_support {

class AsyncPeftModel : public AsyncPeftTiers {
 public:
  using AsyncPeftTiers::AsyncPeftTiers;

  Outcome add(RequestId request, TaskId task, const std::optional<Task>& weights, bool started) {
    if (const auto current = task_of(request); current && *current != task) {
      return Outcome::conflict;
    }
    if (failed.contains(request)) {
      return Outcome::ok;
    }
    if (const Outcome refused = admit(task, weights, started); refused != Outcome::ok) {
      return refused;
    }
    const Outcome outcome = bring_into_host(task, weights.has_value(), started);
    if (outcome != Outcome::ok) {
      forget_if_gone(task);
      return outcome;
    }
    const auto life = lives.find(request);
    if (life != lives.end()) {
      life->second.is_paused = false;
    } else {
      owned_since_.try_emplace(task, ++clock_);
      lives[request] = {task, started, false};
    }
    update_class(task);
    use(device, task);
    return Outcome::ok;
  }

  void mark_done(RequestId request, bool pause) {
    const auto life = lives.find(request);
    if (!pause) {
      failed.erase(request);
    }
    if (life == lives.end() || (pause && life->second.is_paused)) {
      return;
    }
    const TaskId task = life->second.task;
    if (pause) {
      life->second.is_paused = life->second.has_started = true;
    } else {
      lives.erase(life);
      drop_owners_if_none(task);
    }
    update_class(task);
  }

  // A load has ended, and the manager was told to take it over.
  void apply(TaskId task, pagedlora::Tier tier, bool loaded) {
    Tier& entries = cache(tier);
    if (loaded) {
      entries.at(task).is_loading = false;
    } else if (entries.at(task).is_refill && tasks.at(task).is_registered()) {
      entries.at(task).is_refill = false;  // goes on, from the source
    } else {
      entries.erase(task);
      if (tier == pagedlora::Tier::host) {
        tasks.at(task).user_pins = 0;
        fail_owners(task);
      }
    }
    forget_if_gone(task);
  }

  void prefetch(const std::vector<TaskId>& window) {
    std::vector<TaskId> previous = std::exchange(window_, {});
    for (auto& [task, info] : tasks) {
      info.position = kNoPosition;
    }
    for (const TaskId task : window) {
      const auto found = tasks.find(task);
      if (found != tasks.end() && found->second.position == kNoPosition) {
        found->second.position = window_.size();
        window_.push_back(task);
      }
    }
    previous.insert(previous.end(), window_.begin(), window_.end());
    for (const TaskId task : previous) {
      update_class(task);
    }
    bring_window_in();
  }

  // The distinct tasks of the batch in order, those that cannot be served left out; or why not.
  Outcome claim_batch(const std::vector<RequestId>& batch, bool reset,
                      std::vector<TaskId>& claimed) {
    claimed.clear();
    for (const RequestId request : batch) {
      const auto life = lives.find(request);
      if (life != lives.end() && !life->second.is_paused &&
          std::ranges::find(claimed, life->second.task) == claimed.end()) {
        claimed.push_back(life->second.task);
      }
    }
    std::size_t needed = 0;
    std::size_t room = free_pages(pagedlora::Tier::device);
    for (const auto& [task, copy] : device) {
      room +=
          copy.leases == 0 && std::ranges::find(claimed, task) == claimed.end() ? copy.pages : 0;
    }
    for (const TaskId task : claimed) {
      needed += device.contains(task) ? 0 : tasks.at(task).pages;
    }
    if (needed > room) {
      return Outcome::full;
    }
    if (reset) {
      demote_all();
    }
    for (const TaskId task : claimed) {
      if (device.contains(task)) {
        ++device.at(task).leases;
        update_class(task);
      }
    }
    make_room(pagedlora::Tier::device, needed);
    for (const TaskId task : claimed) {
      if (!device.contains(task)) {
        device[task] = {tasks.at(task).pages, true, 1, EvictionClass::unowned, 0, 0, false};
        use(device, task);
        update_class(task);
      } else {
        use(device, task);
      }
    }
    return Outcome::ok;
  }
  // After its loads ended: the task is in the lease, or its copy failed.
  void settle_batch(const std::vector<RequestId>& batch, TaskId task, bool leased) {
    if (!leased) {
      device.erase(task);
      forget_if_gone(task);
      return;
    }
    device.at(task).is_loading = false;
    bool newly_started = false;
    for (const RequestId request : batch) {
      const auto life = lives.find(request);
      if (life != lives.end() && life->second.task == task && !life->second.is_paused) {
        newly_started |= !std::exchange(life->second.has_started, true);
      }
    }
    if (newly_started) {
      update_class(task);
    }
  }
  void close_lease(const std::vector<TaskId>& leased) {
    for (const TaskId task : leased) {
      --device.at(task).leases;
    }
  }

  void demote_all() {
    for (auto& [task, copy] : device) {
      if (copy.leases == 0) {
        copy.eviction_class = EvictionClass::unowned;
        copy.distance = 0;
      }
    }
  }
  void evict_unowned(pagedlora::Tier tier) {
    std::vector<TaskId> victims;
    for (const auto& [task, copy] : cache(tier)) {
      const bool stays =
          tier == pagedlora::Tier::host ? tasks.at(task).user_pins != 0 : copy.leases != 0;
      if (!stays && !is_owned(task)) {
        victims.push_back(task);
      }
    }
    for (const TaskId task : victims) {
      give_up(tier, task);
      forget_if_gone(task);
    }
  }

  Outcome pin(TaskId task) {
    if (!tasks.contains(task)) {
      return Outcome::not_cached;
    }
    Task& info = tasks.at(task);
    if (!fits_some_day(info)) {
      return Outcome::too_large;
    }
    if (info.user_pins == 0) {
      if (info.pages + std::max(largest, info.pages) > host_pages_ - pinned_pages()) {
        return Outcome::full;
      }
      const Outcome outcome = bring_into_host(task, false, false);
      if (outcome != Outcome::ok) {
        return outcome;
      }
    }
    ++info.user_pins;
    return Outcome::ok;
  }
  void unpin(TaskId task) { --tasks.at(task).user_pins; }

  std::size_t largest = 0;  // pages of any registered adapter

 private:
  Outcome admit(TaskId task, const std::optional<Task>& weights, bool started) {
    const auto found = tasks.find(task);
    if (found == tasks.end() && !weights) {
      return Outcome::not_cached;
    }
    if (weights) {
      if (found != tasks.end() && found->second.is_registered()) {
        return Outcome::conflict;
      }
      if (found != tasks.end() && found->second.version == weights->version) {
        return Outcome::ok;
      }
      if (!fits_some_day(*weights)) {
        return Outcome::too_large;
      }
      if (found != tasks.end()) {
        if (is_owned(task) || found->second.user_pins != 0 || is_leased(task)) {
          return Outcome::conflict;
        }
        if (weights->pages > free_pages(pagedlora::Tier::host) + evictable(pagedlora::Tier::host) +
                                 (started ? revocable_pages() : 0)) {
          return Outcome::full;
        }
        for (const pagedlora::Tier tier : {pagedlora::Tier::host, pagedlora::Tier::device}) {
          if (cache(tier).contains(task)) {
            give_up(tier, task);
          }
        }
        std::erase(window_, task);
        tasks.erase(task);
      }
      largest = std::max(largest, weights->pages);
      tasks.try_emplace(task, *weights);
    }
    return host.contains(task) || fits_some_day(tasks.at(task)) ? Outcome::ok : Outcome::too_large;
  }

  Outcome bring_into_host(TaskId task, bool with_weights, bool started) {
    if (host.contains(task)) {
      use(host, task);
      return Outcome::ok;
    }
    const std::size_t pages = tasks.at(task).pages;
    if (!is_resident(device, task) && !with_weights && !tasks.at(task).is_registered()) {
      return Outcome::not_cached;
    }
    const std::size_t room = free_pages(pagedlora::Tier::host) + evictable(pagedlora::Tier::host);
    if (pages > room && (!started || !revoke(pages - room))) {
      return Outcome::full;
    }
    make_room(pagedlora::Tier::host, pages);
    const bool is_refill = is_resident(device, task);
    host[task] = {pages, true, 0, EvictionClass::unowned, 0, 0, is_refill};
    use(host, task);
    update_class(task);
    return Outcome::ok;
  }

  // Tasks that can be taken from their owners, by when they got the first of them.
  std::vector<std::pair<std::uint64_t, TaskId>> revocable() const {
    std::vector<std::pair<std::uint64_t, TaskId>> candidates;
    for (const auto& [task, since] : owned_since_) {
      const bool keeps = std::ranges::any_of(lives, [&, id = task](const auto& item) {
        return item.second.task == id && (item.second.has_started || item.second.is_paused);
      });
      if (!keeps && tasks.at(task).user_pins == 0 && !is_leased(task)) {
        candidates.emplace_back(since, task);
      }
    }
    return candidates;
  }
  std::size_t revocable_pages() const {
    std::size_t pages = 0;
    for (const auto& [since, task] : revocable()) {
      pages += tasks.at(task).pages;
    }
    return pages;
  }

  // Takes tasks from owners that have not started, the latest first; false if that is not enough.
  bool revoke(std::size_t missing) {
    if (revocable_pages() < missing) {
      return false;
    }
    std::vector<std::pair<std::uint64_t, TaskId>> candidates = revocable();
    std::ranges::sort(candidates, std::greater<>());
    for (const auto& [since, task] : candidates) {
      if (missing == 0) {
        break;
      }
      missing -= std::min(missing, tasks.at(task).pages);
      std::erase_if(lives, [&, id = task](const auto& item) { return item.second.task == id; });
      owned_since_.erase(task);
      update_class(task);
    }
    return true;
  }

  void bring_window_in() {
    bool host_has_room = true;
    bool device_has_room = true;
    const std::vector<TaskId> window = window_;
    for (const TaskId task : window) {
      const auto found = tasks.find(task);
      if (found == tasks.end()) {
        continue;
      }
      const std::size_t pages = found->second.pages;
      const std::uint64_t position = found->second.position;
      if (!host.contains(task)) {
        const bool possible =
            (found->second.is_registered() || is_resident(device, task)) && pages <= device_pages_;
        host_has_room = host_has_room &&
                        (!possible || has_room_for_waiting(pagedlora::Tier::host, pages, position));
        if (host_has_room && possible) {
          bring_into_host(task, false, false);
        }
      } else if (is_resident(host, task) && !device.contains(task)) {
        device_has_room =
            device_has_room && has_room_for_waiting(pagedlora::Tier::device, pages, position);
        if (device_has_room) {
          make_room(pagedlora::Tier::device, pages);
          device[task] = {pages, true, 0, EvictionClass::unowned, 0, 0};
          use(device, task);
          update_class(task);
        }
      }
    }
  }
};

}  // namespace pagedlora::testing_support
