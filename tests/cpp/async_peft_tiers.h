// The tiers of the model in async_peft_model.h: what is where, who owns it, and who is given up next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "pagedlora/ids.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/peft_cache_manager.h"

namespace pagedlora::testing_support {

class AsyncPeftTiers {
 public:
  static constexpr std::uint64_t kNoPosition = ~std::uint64_t{0};

  struct Copy {
    std::size_t pages = 0;
    bool is_loading = true;
    int leases = 0;
    EvictionClass eviction_class = EvictionClass::unowned;
    std::uint64_t distance = 0;
    std::uint64_t used = 0;
    bool is_refill = false;  // from the device
  };
  struct Task {
    std::size_t pages = 0;
    int version = 0;  // of carried weights; registered tasks have 0
    int user_pins = 0;
    std::uint64_t position = kNoPosition;  // in the window
    bool is_registered() const { return version == 0; }
  };
  struct Life {
    TaskId task;
    bool has_started = false;
    bool is_paused = false;
  };
  using Tier = std::map<TaskId, Copy>;
  using Eviction = std::pair<pagedlora::Tier, TaskId>;

  AsyncPeftTiers(std::size_t host_pages, std::size_t device_pages)
      : host_pages_(host_pages), device_pages_(device_pages) {}

  std::map<RequestId, Life> lives;
  std::map<RequestId, TaskId> failed;
  std::map<TaskId, Task> tasks;
  Tier host;
  Tier device;
  std::vector<Eviction> evictions;  // in order
  std::vector<RequestId> newly_failed;

  std::size_t free_pages(pagedlora::Tier tier) const {
    std::size_t free = total(tier);
    for (const auto& [task, copy] : cache(tier)) {
      free -= copy.pages;
    }
    return free;
  }
  bool is_owned(TaskId task) const { return owned_since_.contains(task); }
  bool is_leased(TaskId task) const { return device.contains(task) && device.at(task).leases > 0; }
  bool is_resident(const Tier& tier, TaskId task) const {
    const auto found = tier.find(task);
    return found != tier.end() && !found->second.is_loading;
  }
  std::optional<TaskId> task_of(RequestId request) const {
    if (const auto life = lives.find(request); life != lives.end()) {
      return life->second.task;
    }
    const auto failure = failed.find(request);
    return failure == failed.end() ? std::nullopt : std::optional(failure->second);
  }
  AdapterState state_of(RequestId request) const {
    if (failed.contains(request)) {
      return AdapterState::failed;
    }
    const auto life = lives.find(request);
    if (life == lives.end()) {
      return AdapterState::waiting;
    }
    const TaskId task = life->second.task;
    return is_resident(host, task) || is_resident(device, task) ? AdapterState::ready
                                                                : AdapterState::loading;
  }

 protected:
  Tier& cache(pagedlora::Tier tier) { return tier == pagedlora::Tier::host ? host : device; }
  const Tier& cache(pagedlora::Tier tier) const {
    return tier == pagedlora::Tier::host ? host : device;
  }
  std::size_t total(pagedlora::Tier tier) const {
    return tier == pagedlora::Tier::host ? host_pages_ : device_pages_;
  }
  std::size_t pinned_pages() const {
    std::size_t pages = 0;
    for (const auto& [task, info] : tasks) {
      pages += info.user_pins != 0 ? info.pages : 0;
    }
    return pages;
  }
  bool fits_some_day(const Task& info) const {
    const std::size_t others = pinned_pages() - (info.user_pins != 0 ? info.pages : 0);
    return info.pages + others <= host_pages_ && info.pages <= device_pages_;
  }
  bool is_kept(pagedlora::Tier tier, TaskId task, const Copy& copy) const {
    return tier == pagedlora::Tier::device ? copy.leases != 0
                                           : is_owned(task) || tasks.at(task).user_pins != 0;
  }

  void use(Tier& tier, TaskId task) {
    ++clock_;
    if (const auto found = tier.find(task); found != tier.end()) {
      found->second.used = clock_;
    }
  }
  static void set_class(Tier& tier, TaskId task, EvictionClass to, std::uint64_t distance) {
    if (const auto found = tier.find(task); found != tier.end()) {
      found->second.eviction_class = to;
      found->second.distance = distance;
    }
  }
  // Nearest first: the window, then tasks whose owners have not started, the oldest first.
  void update_class(TaskId task) {
    const auto found = tasks.find(task);
    if (found == tasks.end()) {
      return;
    }
    const std::uint64_t position = found->second.position;
    const bool in_window = position != kNoPosition;
    const EvictionClass without_owners =
        in_window ? EvictionClass::waiting : EvictionClass::unowned;
    set_class(host, task, without_owners, position);
    EvictionClass least = without_owners;
    for (const auto& [request, life] : lives) {
      if (life.task == task) {
        least = std::max(least, life.is_paused     ? EvictionClass::paused
                                : life.has_started ? EvictionClass::active
                                                   : EvictionClass::waiting);
      }
    }
    const std::uint64_t behind =
        is_owned(task) ? (std::uint64_t{1} << 40) + owned_since_.at(task) : kNoPosition;
    set_class(device, task, least, std::min(position, behind));
  }

  void drop_owners_if_none(TaskId task) {
    const bool owned =
        std::ranges::any_of(lives, [&](const auto& item) { return item.second.task == task; });
    if (!owned) {
      owned_since_.erase(task);
      forget_if_gone(task);
    }
  }
  void fail_owners(TaskId task) {
    if (!is_owned(task)) {
      return;
    }
    for (const bool paused : {false, true}) {
      for (const auto& [request, life] : lives) {
        if (life.task == task && life.is_paused == paused) {
          failed[request] = task;
          newly_failed.push_back(request);
        }
      }
    }
    std::erase_if(lives, [&](const auto& item) { return item.second.task == task; });
    owned_since_.erase(task);
    update_class(task);
  }
  void forget_if_gone(TaskId task) {
    const auto found = tasks.find(task);
    if (found != tasks.end() && !found->second.is_registered() && !host.contains(task) &&
        !device.contains(task) && !is_owned(task)) {
      tasks.erase(found);
      std::erase(window_, task);
    }
  }

  void give_up(pagedlora::Tier tier, TaskId task) {
    evictions.emplace_back(tier, task);
    cache(tier).erase(task);
  }
  // Who goes next of those that `may_go`.
  template <class MayGo>
  std::optional<TaskId> next_victim(pagedlora::Tier tier, MayGo may_go) const {
    std::optional<std::tuple<EvictionClass, std::uint64_t, TaskId>> first;
    for (const auto& [task, copy] : cache(tier)) {
      if (!is_kept(tier, task, copy) && may_go(copy)) {
        const bool waits = copy.eviction_class == EvictionClass::waiting;
        const std::tuple rank(copy.eviction_class, waits ? ~copy.distance : copy.used, task);
        first = first ? std::min(*first, rank) : rank;
      }
    }
    return first ? std::optional(std::get<2>(*first)) : std::nullopt;
  }
  std::size_t evictable(pagedlora::Tier tier) const {
    std::size_t pages = 0;
    for (const auto& [task, copy] : cache(tier)) {
      pages += is_kept(tier, task, copy) ? 0 : copy.pages;
    }
    return pages;
  }
  void make_room(pagedlora::Tier tier, std::size_t pages) {
    std::vector<TaskId> gone;
    while (free_pages(tier) < pages) {
      gone.push_back(*next_victim(tier, [](const Copy&) { return true; }));
      give_up(tier, gone.back());
    }
    for (const TaskId task : gone) {
      forget_if_gone(task);
    }
  }
  bool has_room_for_waiting(pagedlora::Tier tier, std::size_t pages, std::uint64_t position) const {
    std::size_t room = free_pages(tier);
    for (const auto& [task, copy] : cache(tier)) {
      const bool may_go =
          copy.eviction_class == EvictionClass::unowned ||
          (copy.eviction_class == EvictionClass::waiting && copy.distance > position);
      room += may_go && !is_kept(tier, task, copy) ? copy.pages : 0;
    }
    return pages <= room;
  }

  std::size_t host_pages_;
  std::size_t device_pages_;
  std::uint64_t clock_ = 0;
  std::map<TaskId, std::uint64_t> owned_since_;
  std::vector<TaskId> window_;
};

}  // namespace pagedlora::testing_support
