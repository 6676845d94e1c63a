// The two-tier cache of adapters, driven by what happens to requests.
//
// When to use it: an engine calls add_request_peft when a request enters, ensure_batch before
// each step, BatchLease::close after it, mark_request_done when a request is suspended or ends.
//
// Per task two sets of request ids (task_owners.h) decide what may be evicted:
//
//   call                          A, P        device copy              host copy
//   add_request_peft(r)           A+r, P-r    filled by ensure_batch   resident on return; pinned
//                                                                      while A or P has members
//   mark_request_done(r, pause),  A-r, P+r    A empty: given up        stays pinned
//     r in A                                  before active ones
//   mark_request_done(r)          -r          A and P empty: given     A and P empty: evictable
//                                             up first
//   either, r in neither          nothing     -                        -
//
// Device victims: no owner, then paused, then active; never what an open lease reads. Host victims:
// only tasks without owners. Within a class the policy decides; adding a request and ensuring a
// batch are uses of the task, closing a lease and marking a request done are not.
//
// Loads happen inside the call: source -> host in add_request_peft, host -> device in ensure_batch.
// A call that throws has changed neither owners nor residency, with two exceptions: victims that a
// load had already displaced stay evicted, and so do old weights under a task id that nobody used
// once the load of new ones has begun.
//
// Thread-safe: one lock, held during loads. Every public call may block on a load of another
// thread's call.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "pagedlora/adapter_plan.h"
#include "pagedlora/batch_lease.h"
#include "pagedlora/device.h"
#include "pagedlora/layout_cache.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/stats.h"
#include "pagedlora/task_owners.h"

namespace pagedlora {

enum class Tier : std::uint8_t { host, device };

struct PeftCacheSizes {
  std::size_t host_cache_bytes = 0;
  std::size_t device_cache_bytes = 0;
  std::size_t page_bytes = 0;      // 0: searched for (page_size_search.h)
  std::size_t max_part_bytes = 0;  // 0: page_bytes; searched for together with a page size of 0
};

// Weights that come with a request instead of from a registered source.
struct CarriedWeights {
  std::shared_ptr<const AdapterPlan> plan;
  std::string digest;  // tells one content from another
};

class PeftCacheManager {
 public:
  // Page counts round down: a tier never exceeds its budget. Throws InvalidArgumentError when a
  // budget holds no page, OutOfMemoryError when the system has not that much.
  PeftCacheManager(std::shared_ptr<const LoraModelConfig> config, const PeftCacheSizes& sizes,
                   std::shared_ptr<Device> device, const PolicyFactory& make_policy);
  ~PeftCacheManager();
  PeftCacheManager(const PeftCacheManager&) = delete;
  PeftCacheManager& operator=(const PeftCacheManager&) = delete;

  // Makes a task known, with the source it is read from whenever needed. Reads nothing. Ids come
  // from a counter that starts at kFirstRegisteredTask and never repeats.
  TaskId register_task(std::shared_ptr<const AdapterPlan> plan);

  // Makes `request` an active owner of `task` and brings the task into the host tier.
  // `weights`: null, or the weights of a task that has no source. Idempotent.
  // Throws PeftTaskNotCachedError (unknown task, no weights), RequestConflictError (the request
  // lives with another task; other weights than those of the live task; weights for a registered
  // task), AdapterTooLargeError, LoraCacheFullError, and what reading the source throws.
  void add_request_peft(RequestId request, TaskId task, const CarriedWeights* weights = nullptr);

  // pause: suspended or to be recomputed; else finished. Idempotent; unknown requests are ignored.
  void mark_request_done(RequestId request, bool pause = false);

  // Leases the device copies of the requests' tasks, after copying in those that are absent, in
  // call order, with one all-or-nothing claim for their sum. Closes the previous lease first.
  // Throws LoraCacheFullError when the sum does not fit; nothing was changed then. Requests that
  // were never added, or whose copy failed, are in the lease's errors; the others are leased.
  std::shared_ptr<BatchLease> ensure_batch(std::span<const RequestId> requests,
                                           bool reset_device_cache = false);

  // Every device copy outside an open lease counts as unowned until its task is used again.
  void reset_device_cache();

  bool is_task_cached(TaskId task, Tier tier) const;  // resident in that tier
  bool is_task_done(TaskId task) const;               // no active and no paused owner
  bool is_task_done_device(TaskId task) const;        // no active owner
  std::unordered_map<TaskId, std::set<RequestId>> active_tasks() const;
  std::unordered_map<TaskId, std::set<RequestId>> paused_tasks() const;
  std::optional<TaskId> task_of(RequestId request) const;

  // Pages of the task in either tier. Throws PeftTaskNotCachedError for an unknown one.
  std::size_t num_pages_of(TaskId task);
  std::size_t num_pages_of(const AdapterPlan& plan);

  // Runs `read` on the task's pages while the lock keeps them in place. Throws
  // PeftTaskNotCachedError if the task is not resident in the tier.
  void read_task(TaskId task, Tier tier,
                 const std::function<void(const TaskPages&, const AdapterPlan&)>& read);

  // Frees what unowned tasks hold in `tier`; for tests and for giving memory back.
  void evict_unowned(Tier tier);

  std::size_t max_pages(Tier tier) const;
  std::size_t free_pages(Tier tier) const;
  std::size_t resident_tasks(Tier tier) const;
  // Address of the tier's first page and bytes of all of them.
  std::pair<std::uintptr_t, std::size_t> pool_range(Tier tier) const;
  std::size_t page_bytes() const { return params_.page_bytes; }
  const LayoutParams& layout_params() const { return params_; }
  const LoraModelConfig& config() const { return *config_; }
  PeftCacheStats stats() const;

  // Closes the open lease; register_task, add_request_peft and ensure_batch then throw
  // InvalidArgumentError. Idempotent.
  void close();

  // Throws std::logic_error saying which invariant is broken.
  void check_invariants() const;

  static constexpr std::uint64_t kFirstRegisteredTask = std::uint64_t{1} << 32;

 private:
  struct TaskRecord {
    std::shared_ptr<const AdapterPlan> plan;
    std::shared_ptr<const Layout> layout;  // set while the task is in a tier
    std::string digest;                    // of carried weights; empty for registered tasks
    bool was_read = false;
  };

  TaskRecord& require_record(TaskId task);
  void admit_record(RequestId request, TaskId task, const CarriedWeights* weights);
  void admit_carried(TaskId task, const CarriedWeights& weights);
  std::shared_ptr<const Layout> layout_of(TaskRecord& record);
  void check_fits_some_day(std::size_t pages) const;
  void make_room(LoraCache& cache, std::size_t pages);
  void bring_into_host(TaskId task, const AdapterPlan& plan);
  void read_source(TaskId task, TaskRecord& record, const AdapterPlan& plan);
  void refill_host_from_device(TaskId task, TaskRecord& record);
  void copy_to_device(TaskId task);
  void check_plan(const AdapterPlan& plan) const;
  std::vector<TaskId> resolve_batch(std::span<const RequestId> requests, BatchLease& lease);
  void claim_batch(const std::vector<TaskId>& tasks, bool reset_device_cache);
  void fill_lease(const std::vector<TaskId>& tasks, std::span<const RequestId> requests,
                  BatchLease& lease);
  void undo_claims(const std::vector<TaskId>& tasks, const BatchLease& lease) noexcept;
  void release_lease(const std::vector<BatchLease::LeasedTask>& tasks) noexcept;
  std::unique_lock<std::mutex> lock_without_lease();
  void forget_if_gone(TaskId task);
  EvictionClass class_of(TaskId task) const;
  TaskPages pages_of(const LoraCache& cache, TaskId task) const;
  LoraCache& cache_of(Tier tier) { return tier == Tier::host ? host_ : device_; }
  const LoraCache& cache_of(Tier tier) const { return tier == Tier::host ? host_ : device_; }
  void check_open() const;

  const std::shared_ptr<const LoraModelConfig> config_;
  const LayoutParams params_;
  mutable std::mutex mutex_;  // guards everything below
  LayoutCache layouts_;
  LoraCache host_;
  LoraCache device_;
  TaskOwners owners_;
  std::unordered_map<TaskId, TaskRecord> records_;
  std::uint64_t next_task_ = kFirstRegisteredTask;
  std::vector<std::byte> chunk_;
  PeftCacheStats stats_;
  std::uint64_t uses_ = 0;  // numbers the uses of tasks in call order, which victims follow
  std::weak_ptr<BatchLease> open_lease_;
  std::size_t leased_pins_ = 0;  // device pins that leases hold
  std::condition_variable lease_released_;
  bool closed_ = false;
};

}  // namespace pagedlora
