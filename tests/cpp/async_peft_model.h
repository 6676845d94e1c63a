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

#include "pagedlora/ids.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_model.h"

namespace pagedlora::testing_support {

class AsyncPeftModel {
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

  AsyncPeftModel(std::size_t host_pages, std::size_t device_pages)
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

  std::size_t host_pages_;
  std::size_t device_pages_;
  std::uint64_t clock_ = 0;
  std::map<TaskId, std::uint64_t> owned_since_;
  std::vector<TaskId> window_;
};

}  // namespace pagedlora::testing_support
