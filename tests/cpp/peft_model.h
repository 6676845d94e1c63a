// What PeftCacheManager should do, as maps and a clock: who owns what, what is where, who goes
// next.
//
// The tests run it beside the manager and compare everything that can be seen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "pagedlora/ids.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/stats.h"

namespace pagedlora::testing_support {

enum class Outcome { ok, conflict, not_cached, too_large, full, failed };

// What goes wrong in a load, if the call comes to that.
struct PlannedFailures {
  bool open = false;
  bool read = false;    // or finish
  int copy_after = -1;  // device copies until one fails; -1: none
};

class PeftModel {
 public:
  struct Copy {
    std::size_t pages = 0;
    EvictionClass eviction_class = EvictionClass::unowned;
    std::uint64_t used = 0;
    bool is_leased = false;
  };
  struct Life {
    TaskId task;
    bool is_paused = false;
    bool has_started = false;
  };
  struct Weights {  // carried ones; registered tasks have version 0
    int version = 0;
    std::size_t pages = 0;
  };
  using Tasks = std::map<TaskId, Copy>;

  PeftModel(std::size_t host_pages, std::size_t device_pages)
      : host_pages_(host_pages), device_pages_(device_pages) {}

  std::map<RequestId, Life> requests;
  std::map<TaskId, Weights> known;
  std::set<TaskId> registered;
  Tasks host;
  Tasks device;
  std::vector<TaskId> lease;
  std::set<RequestId> errors;  // of the last batch
  PeftCacheStats stats;

  std::size_t free_host() const { return free_pages(host, host_pages_); }
  std::size_t free_device() const { return free_pages(device, device_pages_); }

  bool is_owned(TaskId task) const {
    return std::ranges::any_of(requests, [&](const auto& r) { return r.second.task == task; });
  }
  bool is_active(TaskId task) const {
    return std::ranges::any_of(
        requests, [&](const auto& r) { return r.second.task == task && !r.second.is_paused; });
  }

  void register_task(TaskId task, std::size_t pages) {
    known[task] = {0, pages};
    registered.insert(task);
  }

  Outcome add(RequestId request, TaskId task, const std::optional<Weights>& weights,
              PlannedFailures failures) {
    const auto life = requests.find(request);
    if (life != requests.end() && life->second.task != task) {
      return Outcome::conflict;
    }
    if (!known.contains(task) && !weights) {
      return Outcome::not_cached;
    }
    if (weights) {
      if (const auto refused = admit(task, *weights)) {
        return *refused;
      }
    }
    if (known.at(task).pages > std::min(host_pages_, device_pages_)) {
      return Outcome::too_large;
    }
    const bool is_hit = host.contains(task) && (life == requests.end() || life->second.is_paused);
    const Outcome outcome = bring_into_host(task, failures);
    if (outcome != Outcome::ok) {
      if (outcome == Outcome::failed) {
        use(device, task);  // by the call, before its load failed
      }
      forget_if_gone(task);
      return outcome;
    }
    if (!is_owned(task)) {
      owned_since_[task] = ++clock_;
    }
    stats.host.hits += is_hit ? 1 : 0;
    requests[request] = {task, false, requests.contains(request) && requests[request].has_started};
    use(host, task);
    use(device, task);
    set_class(task);
    return Outcome::ok;
  }

  void mark_done(RequestId request, bool pause) {
    const auto life = requests.find(request);
    if (life == requests.end() || (pause && life->second.is_paused)) {
      return;
    }
    const TaskId task = life->second.task;
    if (pause) {
      life->second.is_paused = true;
      life->second.has_started = true;
    } else {
      requests.erase(life);
    }
    set_class(task);
  }

  void close_lease() {
    for (const TaskId task : lease) {
      device.at(task).is_leased = false;
    }
    lease.clear();
  }

  Outcome ensure(const std::vector<RequestId>& batch, bool reset, PlannedFailures failures) {
    close_lease();
    errors.clear();
    std::vector<TaskId> tasks;
    for (const RequestId request : batch) {
      const auto life = requests.find(request);
      if (life == requests.end() || life->second.is_paused) {
        errors.insert(request);
      } else if (std::ranges::find(tasks, life->second.task) == tasks.end()) {
        tasks.push_back(life->second.task);
      }
    }
    std::size_t needed = 0;
    std::vector<TaskId> present;
    for (const TaskId task : tasks) {
      if (device.contains(task)) {
        present.push_back(task);
        device.at(task).is_leased = true;
      } else {
        needed += known.at(task).pages;
      }
    }
    if (needed > most_device()) {
      for (const TaskId task : present) {
        device.at(task).is_leased = false;
      }
      return Outcome::full;
    }
    if (reset) {
      for (const TaskId task : present) {
        device.at(task).is_leased = false;  // the batch's own copies are demoted as well
      }
      demote_all();
      for (const TaskId task : present) {
        device.at(task).is_leased = true;
      }
    }
    for (const TaskId task : present) {
      device.at(task).eviction_class = class_of(task);
    }
    static_cast<void>(make_room_on_device(needed));
    stats.device.hits += present.size();
    stats.device.misses += tasks.size() - present.size();
    for (const TaskId task : tasks) {
      if (!device.contains(task) && failures.copy_after-- == 0) {
        ++stats.failed_loads;
        add_errors(batch, task);
        continue;
      }
      Copy& copy = device[task];
      copy.pages = known.at(task).pages;
      copy.is_leased = true;
      use(device, task);
      lease.push_back(task);
    }
    for (const RequestId request : batch) {
      if (!errors.contains(request)) {
        requests.at(request).has_started = true;
      }
    }
    for (const TaskId task : lease) {
      set_class(task);
    }
    return Outcome::ok;
  }

  void demote_all() {
    for (auto& [task, copy] : device) {
      if (!copy.is_leased) {
        copy.eviction_class = EvictionClass::unowned;
      }
    }
  }

  void evict_unowned(bool on_host) {
    Tasks& tier = on_host ? host : device;
    TierStats& counted = on_host ? stats.host : stats.device;
    std::erase_if(tier, [&](const auto& item) {
      const bool goes = !item.second.is_leased && !is_owned(item.first);
      counted.tasks_evicted += goes ? 1U : 0U;
      counted.pages_evicted += goes ? item.second.pages : 0;
      return goes;
    });
    std::erase_if(known, [&](const auto& item) { return is_lost(item.first); });
  }

 private:
  static std::size_t free_pages(const Tasks& tier, std::size_t total) {
    for (const auto& [task, copy] : tier) {
      total -= copy.pages;
    }
    return total;
  }
  EvictionClass class_of(TaskId task) const {
    EvictionClass least = EvictionClass::unowned;
    for (const auto& [request, life] : requests) {
      if (life.task == task) {
        least = std::max(least, life.is_paused     ? EvictionClass::paused
                                : life.has_started ? EvictionClass::active
                                                   : EvictionClass::waiting);
      }
    }
    return least;
  }
  void set_class(TaskId task) {
    const auto found = device.find(task);
    if (found != device.end()) {
      found->second.eviction_class = class_of(task);
    }
  }
  bool is_lost(TaskId task) const {
    return !registered.contains(task) && !host.contains(task) && !device.contains(task) &&
           !is_owned(task);
  }
  void forget_if_gone(TaskId task) {
    if (is_lost(task)) {
      known.erase(task);
    }
  }
  void add_errors(const std::vector<RequestId>& batch, TaskId task) {
    for (const RequestId request : batch) {
      const auto life = requests.find(request);
      if (life != requests.end() && life->second.task == task) {
        errors.insert(request);
      }
    }
  }

  std::optional<Outcome> admit(TaskId task, const Weights& weights) {
    if (registered.contains(task)) {
      return Outcome::conflict;
    }
    if (weights.pages > std::min(host_pages_, device_pages_)) {
      return Outcome::too_large;
    }
    const auto found = known.find(task);
    if (found != known.end() && found->second.version != weights.version) {
      if (is_owned(task) || (device.contains(task) && device.at(task).is_leased)) {
        return Outcome::conflict;
      }
      if (weights.pages > most_host()) {
        return Outcome::full;
      }
      drop(host, task, stats.host);
      drop(device, task, stats.device);
    }
    known[task] = weights;
    return std::nullopt;
  }

  static void drop(Tasks& tier, TaskId task, TierStats& counted) {
    const auto found = tier.find(task);
    if (found != tier.end()) {
      ++counted.tasks_evicted;
      counted.pages_evicted += found->second.pages;
      tier.erase(found);
    }
  }

  void use(Tasks& tier, TaskId task) {
    const auto found = tier.find(task);
    if (found != tier.end()) {
      found->second.used = ++clock_;
    }
  }

  // Pages that are free or could be.
  std::size_t most_device() const {
    std::size_t most = free_device();
    for (const auto& [task, copy] : device) {
      most += copy.is_leased ? 0 : copy.pages;
    }
    return most;
  }
  std::size_t most_host() const {
    std::size_t most = free_host();
    for (const auto& [task, copy] : host) {
      most += is_owned(task) ? 0 : copy.pages;
    }
    return most;
  }

  // Evicts by `order` until `needed` pages are free; false if that cannot be.
  bool make_room(Tasks& tier, std::size_t total, std::size_t needed,
                 const std::function<bool(TaskId, const Copy&)>& is_evictable, TierStats& counted) {
    std::size_t most = free_pages(tier, total);
    for (const auto& [task, copy] : tier) {
      most += is_evictable(task, copy) ? copy.pages : 0;
    }
    if (needed > most) {
      return false;
    }
    while (free_pages(tier, total) < needed) {
      const auto victim = std::ranges::min_element(tier, {}, [&](const auto& item) {
        const Copy& copy = item.second;
        // Of those that wait the latest goes first.
        const bool waits = copy.eviction_class == EvictionClass::waiting;
        return std::tuple(!is_evictable(item.first, copy), copy.eviction_class,
                          waits ? ~owned_since_.at(item.first) : copy.used);
      });
      ++counted.tasks_evicted;
      counted.pages_evicted += victim->second.pages;
      const TaskId task = victim->first;
      tier.erase(victim);
      forget_if_gone(task);
    }
    return true;
  }
  bool make_room_on_device(std::size_t needed) {
    return make_room(
        device, device_pages_, needed, [](TaskId, const Copy& copy) { return !copy.is_leased; },
        stats.device);
  }
  bool make_room_on_host(std::size_t needed) {
    return make_room(
        host, host_pages_, needed, [&](TaskId task, const Copy&) { return !is_owned(task); },
        stats.host);
  }

  Outcome bring_into_host(TaskId task, const PlannedFailures& failures) {
    if (host.contains(task)) {
      return Outcome::ok;
    }
    const bool from_device = device.contains(task);
    if (!make_room_on_host(known.at(task).pages)) {
      return Outcome::full;
    }
    ++stats.host.misses;
    const bool copy_fails = from_device && failures.copy_after == 0;
    const bool reads_source = from_device ? copy_fails && registered.contains(task) : true;
    const bool read_fails = reads_source && (failures.open || failures.read);
    stats.failed_loads += (copy_fails ? 1U : 0U) + (read_fails ? 1U : 0U);
    if (read_fails || (copy_fails && !reads_source)) {
      return Outcome::failed;
    }
    host[task].pages = known.at(task).pages;
    stats.source_reads += reads_source ? 1U : 0U;
    return Outcome::ok;
  }

  std::size_t host_pages_;
  std::size_t device_pages_;
  std::uint64_t clock_ = 0;
  std::map<TaskId, std::uint64_t> owned_since_;
};

}  // namespace pagedlora::testing_support
