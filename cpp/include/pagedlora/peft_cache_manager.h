// The two-tier cache of adapters, driven by what happens to requests.
//
// When to use it: an engine calls, step by step: poll(), so that finished loads take effect;
// add_request_peft when a request enters; prefetch with those that wait; ensure_batch before the
// forward and BatchLease::close after it; mark_request_done when a request is suspended or ends.
//
// Per task two sets of request ids (task_owners.h) decide what may be evicted:
//
//   call                          A, P        device copy              host copy
//   add_request_peft(r)           A+r, P-r    filled by ensure_batch   loading starts if absent;
//                                             or prefetch              pinned while A or P has
//                                                                      members
//   mark_request_done(r, pause),  A-r, P+r    A empty: given up        stays pinned
//     r in A                                  before active ones
//   mark_request_done(r)          -r          A and P empty: given     A and P empty: evictable
//                                             up first
//   either, r in neither          nothing     -                        -
//
// A request has started when a batch with it was leased, or it was paused. Device victims: tasks
// without owners; then those that wait (in the prefetch window, or with owners of which none has
// started), the farthest first; then paused; then active; never what an open lease reads. Host
// victims: tasks without owners, those in the prefetch window last. Within a class the policy
// decides; adding a request and ensuring a batch are uses of the task, closing a lease and marking
// a request done are not.
//
// Workers read sources and copy between the tiers. Pages are claimed, and victims chosen, in the
// calls and only there. What a worker has finished takes effect in poll(), in wait_idle(), and, if
// its batch waits for it, in ensure_batch. A load that fails, or takes longer
// than the limit, gives its pages back and makes the task's owners `failed`: a level that each of
// them keeps until it is marked done. A call that throws has changed neither owners nor residency,
// with two exceptions: old weights under a task id that nobody used are gone once the load of new
// ones has begun; and room that was made stays free if std::bad_alloc comes after that.
//
// Thread-safe: one lock, never held while anybody reads, copies or waits; one batch is ensured at a
// time. ensure_batch, poll, wait_idle and close wait, each no longer than it says. In a child of
// fork() close() does nothing and what takes the lock throws InvalidArgumentError (process_mark.h).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pagedlora/adapter_plan.h"
#include "pagedlora/batch_lease.h"
#include "pagedlora/clock.h"
#include "pagedlora/device.h"
#include "pagedlora/layout_cache.h"
#include "pagedlora/lora_cache.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/process_mark.h"
#include "pagedlora/stats.h"
#include "pagedlora/task_owners.h"
#include "pagedlora/task_shortcuts.h"

namespace pagedlora {

namespace internal {
struct JobBoard;
class FillJob;
struct FillTarget;
class Job;
using JobList = std::list<std::shared_ptr<Job>>;
class JobPool;
class LeasePool;
}  // namespace internal

enum class Tier : std::uint8_t { host, device };

struct PeftCacheOptions {
  std::size_t host_cache_bytes = 0;
  std::size_t device_cache_bytes = 0;
  std::size_t page_bytes = 0;          // 0: searched for (page_size_search.h)
  std::size_t max_part_bytes = 0;      // 0: page_bytes; searched for together with a page size of 0
  std::size_t num_put_workers = 4;     // that read sources
  std::size_t num_ensure_workers = 2;  // that copy between the tiers
  std::size_t max_inflight_batches = 1;                 // leases that may be open together
  Clock::Time load_timeout = std::chrono::seconds(60);  // of a read or copy, once it has begun
  std::shared_ptr<const Clock> clock = nullptr;         // nullptr: steady_clock()
  // Called with the manager's lock for every copy that is given up; must not call back.
  std::function<void(Tier, TaskId)> on_evict = {};
};

// What a request's adapter is to its next batch.
enum class AdapterState : std::uint8_t {
  waiting,  // the request owns no task: never added, done, or taken back (revoked)
  loading,
  ready,   // resident in either tier
  failed,  // until the request is done
};

// How a load ended on this rank.
struct LoadOutcome {
  TaskId task;
  Tier tier;
  bool loaded;

  friend bool operator==(const LoadOutcome&, const LoadOutcome&) = default;
};

// Makes the ranks of a tensor-parallel group agree: gets the loads that have ended here, returns
// those that have ended on every rank, as loaded if they are loaded on every rank.
using Agree = std::function<std::vector<LoadOutcome>(const std::vector<LoadOutcome>&)>;

// Weights that come with a request instead of from a registered source.
struct CarriedWeights {
  std::shared_ptr<const AdapterPlan> plan;
  std::string digest;  // tells one content from another
};

class PeftCacheManager {
 public:
  // Page counts round down: a tier never exceeds its budget. Throws InvalidArgumentError when a
  // budget holds no page or an option is 0 that must not be, OutOfMemoryError when the system has
  // not that much.
  PeftCacheManager(std::shared_ptr<const LoraModelConfig> config, PeftCacheOptions options,
                   std::shared_ptr<Device> device, const PolicyFactory& make_policy);
  ~PeftCacheManager();
  PeftCacheManager(const PeftCacheManager&) = delete;
  PeftCacheManager& operator=(const PeftCacheManager&) = delete;

  // Makes a task known, with the source it is read from whenever needed. Reads nothing. Ids come
  // from a counter that starts at kFirstRegisteredTask and never repeats.
  TaskId register_task(std::shared_ptr<const AdapterPlan> plan);

  // Forgets a task and its copies. Throws AdapterInUseError if it has owners or user pins or an
  // open lease reads it; unknown tasks are ignored.
  void unregister_task(TaskId task);

  // Makes `request` an active owner of `task` and starts to bring the task into the host tier.
  // `weights`: null, or the weights of a task that has no source; they are kept until they have been
  // copied. `started`: the request has computed something before, so it may take the place of owners
  // that have not: they wait again, the latest first. Idempotent; a failed request stays failed.
  // Throws PeftTaskNotCachedError (unknown task, no weights), RequestConflictError (the request
  // lives with another task; other weights than those of the live task; weights for a registered
  // task), AdapterTooLargeError and LoraCacheFullError.
  void add_request_peft(RequestId request, TaskId task, const CarriedWeights* weights = nullptr,
                        bool started = false);

  // pause: suspended or to be recomputed; else finished. Idempotent; unknown requests are ignored.
  void mark_request_done(RequestId request, bool pause = false);

  AdapterState adapter_state(RequestId request) const;
  std::exception_ptr adapter_error(RequestId request) const;  // nullptr: not failed

  // Lets loads that have ended take effect, after waiting up to `timeout` for one if there is none.
  // Gives up those whose time is up. Returns the requests that failed since the last time, by id.
  std::vector<RequestId> poll(Clock::Time timeout = {}, const Agree& agree = {});

  // Replaces the window of tasks that will soon be wanted, nearest first, and brings them in: into
  // the host tier, and into the device tier once they are there. What is nearer in the window, and
  // what is started, paused or leased, is never given up for it. Unknown tasks are ignored.
  void prefetch(std::span<const TaskId> window);

  // Leases the device copies of the requests' tasks, after bringing in those that are absent, with
  // one all-or-nothing claim for their sum. Waits for their loads, at most the time limit. If one
  // batch may be in flight, closes the previous lease first, on `stream`, or throws as that does
  // (BatchLease::close); else throws InvalidArgumentError when too many are open.
  // Throws LoraCacheFullError when the sum does not fit; nothing was changed then. Requests that
  // are not active owners, or whose load failed, are in the lease's errors; the others are leased.
  std::shared_ptr<BatchLease> ensure_batch(std::span<const RequestId> requests,
                                           bool reset_device_cache = false, void* stream = nullptr);

  std::vector<TaskId> open_lease_tasks() const;  // each once

  // Every device copy outside an open lease counts as unowned until its task is used again.
  void reset_device_cache();

  // Keeps the task's host copy, or brings it in and keeps it, until as many unpin(). Throws
  // PeftTaskNotCachedError; LoraCacheFullError, also when the pinned ones would leave no room for the
  // largest known adapter beside them.
  void pin(TaskId task);
  void unpin(TaskId task);  // throws PeftTaskNotCachedError, InvalidArgumentError without a pin

  // Why the task's last load failed; nullptr: it did not, or another one was begun since.
  std::exception_ptr load_error(TaskId task) const;

  // Waits until no load is queued or running, up to `timeout`, and lets all of them take effect.
  bool wait_idle(Clock::Time timeout);

  bool is_task_cached(TaskId task, Tier tier) const;  // resident in that tier
  bool is_task_done(TaskId task) const;               // no active and no paused owner
  bool is_task_done_device(TaskId task) const;        // no active owner
  std::unordered_map<TaskId, std::set<RequestId>> active_tasks() const;
  std::unordered_map<TaskId, std::set<RequestId>> paused_tasks() const;
  std::optional<TaskId> task_of(RequestId request) const;
  bool has_started(RequestId request) const;  // an owner that was in a batch or paused
  bool was_revoked(RequestId request) const;  // and neither added nor done since

  // Pages of the task in either tier. Throws PeftTaskNotCachedError for an unknown one.
  std::size_t num_pages_of(TaskId task);
  std::size_t num_pages_of(const AdapterPlan& plan);

  // Runs `read` on the task's pages, which are not written meanwhile; on a copy of them if the CPU
  // cannot read the device's memory. Throws PeftTaskNotCachedError if the task is not resident in the
  // tier.
  void read_task(TaskId task, Tier tier,
                 const std::function<void(const TaskPages&, const AdapterPlan&)>& read);

  // Frees what unowned tasks hold in `tier`; for tests and for giving memory back.
  void evict_unowned(Tier tier);

  std::size_t max_pages(Tier tier) const;
  std::size_t free_pages(Tier tier) const;
  std::size_t resident_tasks(Tier tier) const;
  std::pair<std::uintptr_t, std::size_t> pool_range(Tier tier) const;  // address, bytes
  std::size_t page_bytes() const { return params_.page_bytes; }
  const LayoutParams& layout_params() const { return params_; }
  const LoraModelConfig& config() const { return *config_; }
  PeftCacheStats stats() const;
  IterationStats get_and_reset_iteration_stats();

  // Gives up all loads and closes the open leases; afterwards nothing can be registered, added,
  // prefetched or ensured (InvalidArgumentError). Waits for leases that other threads are closing.
  // Idempotent.
  void close();

  void check_invariants() const;  // throws std::logic_error saying which one is broken

  static constexpr std::uint64_t kFirstRegisteredTask = std::uint64_t{1} << 32;

 private:
  static constexpr std::uint64_t kNoDistance = std::numeric_limits<std::uint64_t>::max();

  // In the order of LoraCache::Entry: what adding a request and marking it done look at comes first.
  struct TaskRecord : OwnedTask {
    TaskRecord(TaskId task, std::shared_ptr<const AdapterPlan> its_plan, std::string its_digest)
        : OwnedTask(task), plan(std::move(its_plan)), digest(std::move(its_digest)) {}

    bool is_in_a_tier() const { return host_entry != nullptr || device_entry != nullptr; }
    bool is_leased() const { return device_entry != nullptr && device_entry->pins != 0; }

    LoraCache::Entry* host_entry = nullptr;  // nullptr: absent
    LoraCache::Entry* device_entry = nullptr;
    std::uint64_t window_position = kNoDistance;  // in the prefetch window
    std::shared_ptr<const AdapterPlan> plan;
    std::shared_ptr<const Layout> layout;   // set while the task is in a tier
    std::string digest;                     // of carried weights; empty for registered tasks
    std::optional<std::uint64_t> checksum;  // of what its first read found
    std::exception_ptr load_error;          // of the last load into the host tier
    std::exception_ptr copy_error;          // of the last copy to the device
    std::uint32_t user_pins = 0;
    std::uint64_t batch = 0;                        // the last one that named it
    std::size_t lease_position = 0;                 // in the last lease of it
    std::shared_ptr<internal::FillJob> host_job;    // that fills the host entry
    std::shared_ptr<internal::FillJob> device_job;  // that fills the device entry
    PageUses device_waits;  // of a device entry without a job: its host copy is awaited
  };
  struct BatchTask {
    TaskId task;
    bool is_claimed;  // by this batch: absent before
    bool is_pinned;   // and not yet by a lease
  };
  struct Revocable {
    std::uint64_t owned_since;
    TaskId task;
    std::size_t pages;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Wanted = std::function<bool(const internal::FillJob&, Tier)>;

  // Records and owners (peft_cache_manager.cc)
  Lock enter() const {  // throws in a child of the process that made this
    process_.check("this PEFT cache manager");
    return Lock(mutex_);
  }
  TaskRecord* find_record(TaskId task);  // nullptr: unknown
  TaskRecord& require_record(TaskId task);
  const TaskRecord& require_record(TaskId task) const;
  TaskRecord& admit_record(RequestId request, TaskId task, const CarriedWeights* weights,
                           bool started);
  void admit_carried(TaskId task, const CarriedWeights& weights, bool started);
  void replace_carried(TaskId task, const TaskRecord& old, std::size_t pages, bool started);
  TaskOwners::Added add_owner(RequestId request, TaskRecord& record, bool started,
                              bool was_on_host);
  std::shared_ptr<const Layout> layout_of(TaskRecord& record);
  void check_fits_some_day(TaskRecord& record);
  void check_plan(const AdapterPlan& plan) const;
  void check_open() const;
  void forget_if_gone(TaskId task);
  void update_class(const TaskRecord& record);
  void update_device_class(const TaskRecord& record, EvictionClass in_window);

  // Pages and loads (peft_cache_manager_loads.cc)
  void make_room(Tier tier, std::size_t pages);
  PageUses claim_on_host(TaskRecord& record);
  void fail_on_host(TaskRecord& record);
  void make_room_on_host(std::size_t pages, bool started);
  std::optional<Shortage> host_shortage(std::size_t pages, bool started) const;
  std::vector<Revocable> revocable_tasks() const;
  void revoke_owners(std::size_t missing_pages);
  void give_up_copy(Tier tier, TaskId task);
  void note_eviction(Tier tier, TaskId task);
  void fail_dependent_device_copy(TaskId task, const std::exception_ptr& error);
  void fail_device_copy(TaskId task, TaskRecord& record, const std::exception_ptr& error);
  void bring_into_host(TaskId task, const std::shared_ptr<const AdapterPlan>& plan, bool started);
  void start_host_load(TaskId task, TaskRecord& record,
                       const std::shared_ptr<const AdapterPlan>& plan, bool started);
  void start_source_load(TaskId task, TaskRecord& record,
                         const std::shared_ptr<const AdapterPlan>& plan);
  void submit_source_load(TaskId task, TaskRecord& record,
                          const std::shared_ptr<const AdapterPlan>& plan, const PageUses& waits);
  void start_refill(TaskId task, TaskRecord& record);
  void claim_on_device(TaskId task, TaskRecord& record);
  void start_device_fill(TaskId task, TaskRecord& record);
  void start_device_copy(TaskId task, TaskRecord& record, const internal::FillTarget& target);
  void join_source_load(TaskId task, TaskRecord& record, const internal::FillTarget& target);

  // What has ended (peft_cache_manager_poll.cc)
  bool is_current(const internal::FillJob& job) const;
  bool fills(const internal::FillJob& job, Tier tier) const;
  void settle(internal::JobList& over, const Wanted& wanted);
  void settle_all(internal::JobList& over);
  void apply(internal::FillJob& job, Tier tier, const std::exception_ptr& error);
  void apply_to_host(TaskRecord& record, internal::FillJob& job, const std::exception_ptr& error);
  void apply_to_device(TaskRecord& record, internal::FillJob& job, const std::exception_ptr& error);
  std::vector<LoadOutcome> ended_loads() const;
  void apply_agreed(const std::vector<LoadOutcome>& agreed);
  bool reads_source_instead(TaskRecord& record, const internal::FillJob& job);
  void fail_host_copy(TaskId task, TaskRecord& record, const std::exception_ptr& error);
  void fail_owners(TaskRecord& record, const std::exception_ptr& error);
  std::vector<RequestId> take_newly_failed();
  void expire_loads();
  void wait_for_change(Lock& lock, Clock::Time deadline);
  bool is_idle() const;

  // Batches (peft_cache_manager_batches.cc)
  Lock lock_for_batch(void* stream);
  Lock lock_without_lease(void* stream);
  void resolve_batch(std::span<const RequestId> requests, BatchLease& lease);
  void claim_batch(bool reset_device_cache);
  void pin_present_tasks();
  void wait_for_batch(Lock& lock, internal::JobList& over);
  bool is_awaited(const internal::FillJob& job, Tier tier) const;
  bool is_settled(const BatchTask& item) const;
  void give_back_unsettled(const std::exception_ptr& error);
  void fill_lease(std::span<const RequestId> requests, BatchLease& lease);
  void start_requests(const BatchLease& lease) noexcept;
  std::exception_ptr error_of(RequestId request) const;
  bool is_leased_by(const BatchLease& lease, TaskId task) const;
  void undo_batch() noexcept;
  void release_lease(const std::vector<BatchLease::LeasedTask>& tasks, void* stream);

  // Prefetch (peft_cache_manager_prefetch.cc)
  void replace_window(std::span<const TaskId> window);
  bool prefetch_into_host(TaskId task, TaskRecord& record);
  bool prefetch_into_device(TaskId task, TaskRecord& record);

  TaskPages pages_of(const LoraCache& cache, TaskId task, const TaskRecord& record) const;
  LoraCache& cache_of(Tier tier) { return tier == Tier::host ? host_ : device_; }
  const LoraCache& cache_of(Tier tier) const { return tier == Tier::host ? host_ : device_; }
  void check_host_pins() const;
  void check_device_pins() const;
  void check_records() const;

  const ProcessMark process_;
  const std::shared_ptr<const LoraModelConfig> config_;
  const LayoutParams params_;
  const PeftCacheOptions options_;
  const std::shared_ptr<const Clock> clock_;
  const std::shared_ptr<internal::LeasePool> leases_;
  const std::shared_ptr<internal::JobBoard> board_;
  std::mutex& mutex_;  // the board's; guards what follows
  LayoutCache layouts_;
  LoraCache host_;
  LoraCache device_;
  TaskOwners owners_;
  std::unordered_map<TaskId, TaskRecord> records_;
  TaskShortcuts<TaskRecord> shortcuts_;  // into the records
  std::uint64_t next_task_ = kFirstRegisteredTask;
  std::vector<TaskId> window_;  // of the last prefetch
  std::size_t user_pinned_pages_ = 0;
  std::size_t largest_pages_ = 0;  // of any task that was ever known
  std::vector<RequestId> newly_failed_;
  PeftCacheStats stats_;
  IterationStats iteration_;
  std::uint64_t uses_ = 0;        // numbers the uses of tasks in call order, which victims follow
  std::vector<BatchTask> batch_;  // that is being ensured
  std::uint64_t batch_number_ = 0;
  std::vector<std::weak_ptr<BatchLease>> open_leases_;
  std::size_t num_open_leases_ = 0;
  std::size_t leased_pins_ = 0;  // device pins that leases hold
  bool closed_ = false;
  std::mutex batch_mutex_;  // taken before the board's: one batch at a time
  const std::shared_ptr<internal::JobPool> put_workers_;
  const std::shared_ptr<internal::JobPool> read_helpers_;  // beside put workers
  const std::unique_ptr<internal::JobPool> ensure_workers_;
};

}  // namespace pagedlora
