// Which tasks are known and who owns them.
#include "pagedlora/peft_cache_manager.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "internal/job_pool.h"
#include "internal/lease_pool.h"
#include "internal/load_jobs.h"
#include "pagedlora/errors.h"
#include "pagedlora/page_size_search.h"

namespace pagedlora {
namespace {

constexpr std::size_t kMaxAbandonedReaders = 16;
// Distances of tasks that wait outside the window: behind all of it, the earliest owner nearest.
constexpr std::uint64_t kBehindWindow = std::uint64_t{1} << 32;

LayoutParams choose_layout_params(const LoraModelConfig& config, const PeftCacheOptions& options) {
  if (options.page_bytes != 0) {
    return checked({options.page_bytes, element_bytes(config.dtype()), options.max_part_bytes});
  }
  return search_layout_params(config,
                              std::min(options.host_cache_bytes, options.device_cache_bytes));
}

PeftCacheOptions checked_options(PeftCacheOptions options) {
  if (options.num_put_workers == 0 || options.num_ensure_workers == 0 ||
      options.max_inflight_batches == 0 || options.load_timeout <= Clock::Time::zero()) {
    throw InvalidArgumentError(
        "num_put_workers, num_ensure_workers, max_inflight_batches and load_timeout must be more "
        "than 0");
  }
  if (options.clock == nullptr) {
    options.clock = steady_clock();
  }
  return options;
}

}  // namespace

PeftCacheManager::PeftCacheManager(std::shared_ptr<const LoraModelConfig> config,
                                   PeftCacheOptions options, std::shared_ptr<Device> device,
                                   const PolicyFactory& make_policy)
    : config_(std::move(config)),
      params_(choose_layout_params(*config_, options)),
      options_(checked_options(std::move(options))),
      clock_(options_.clock),
      leases_(std::make_shared<internal::LeasePool>(config_)),
      board_(std::make_shared<internal::JobBoard>()),
      mutex_(board_->mutex),
      layouts_(config_, params_),
      host_(device->host_tier_device(), "host", options_.host_cache_bytes / params_.page_bytes,
            params_.page_bytes, make_policy),
      device_(std::move(device), "device", options_.device_cache_bytes / params_.page_bytes,
              params_.page_bytes, make_policy),
      put_workers_(std::make_shared<internal::JobPool>(
          board_, clock_,
          internal::JobPool::Options{options_.num_put_workers, kMaxAbandonedReaders,
                                     ScatterPlan::kChunkBytes, options_.load_timeout})),
      read_helpers_(std::make_shared<internal::JobPool>(
          board_, clock_,
          internal::JobPool::Options{internal::num_load_helpers(options_.num_put_workers), 0,
                                     ScatterPlan::kChunkBytes, options_.load_timeout})),
      ensure_workers_(std::make_unique<internal::JobPool>(
          board_, clock_,
          internal::JobPool::Options{options_.num_ensure_workers, kMaxAbandonedReaders, 0,
                                     options_.load_timeout})) {}

PeftCacheManager::~PeftCacheManager() {
  close();
  if (!process_.is_here()) {
    internal::leak(board_);  // somebody may wait there, so that its end would wait for them
  }
}

TaskId PeftCacheManager::register_task(std::shared_ptr<const AdapterPlan> plan) {
  const Lock lock = enter();
  check_open();
  check_plan(*plan);
  while (records_.contains(TaskId{next_task_})) {
    ++next_task_;
  }
  const TaskId task{next_task_++};
  const std::size_t pages = layouts_.get(plan->row_shapes())->num_pages();
  largest_pages_ = std::max(largest_pages_, pages);
  shortcuts_.reserve(records_.size() + 1);
  records_.try_emplace(task, task, nullptr, std::string()).first->second.plan = std::move(plan);
  return task;
}

void PeftCacheManager::unregister_task(TaskId task) {
  decltype(records_)::node_type record;  // outlives the lock, as its source may be anybody's
  const Lock lock = enter();
  const auto found = records_.find(task);
  if (found == records_.end()) {
    return;
  }
  const TaskRecord& known = found->second;
  if (known.is_owned() || known.user_pins != 0 || known.is_leased()) {
    throw AdapterInUseError(task, known.num_owners(), known.user_pins, known.is_leased());
  }
  for (const Tier tier : {Tier::host, Tier::device}) {
    if (cache_of(tier).find(task) != nullptr) {
      give_up_copy(tier, task);
    }
  }
  std::erase(window_, task);
  shortcuts_.forget(known);
  record = records_.extract(task);
}

void PeftCacheManager::add_request_peft(RequestId request, TaskId task,
                                        const CarriedWeights* weights, bool started) {
  const Lock lock = enter();
  check_open();
  if (owners_.failure_of(request) != nullptr) {
    owners_.check_add(request, task);
    return;
  }
  TaskRecord* const known = weights == nullptr ? find_record(task) : nullptr;
  // In the host tier becoming an owner is all that is left, and refused where it must be.
  const bool is_admitted = known != nullptr && known->host_entry != nullptr;
  TaskRecord& record = is_admitted ? *known : admit_record(request, task, weights, started);
  const bool was_on_host = record.host_entry != nullptr;
  if (!was_on_host) {
    bring_into_host(task, weights != nullptr ? weights->plan : record.plan, started);
  }
  const TaskOwners::Added added = add_owner(request, record, started, was_on_host);
  iteration_.requests_resumed += added == TaskOwners::Added::resumed ? 1U : 0U;
  if (was_on_host) {
    stats_.host.hits += added == TaskOwners::Added::already ? 0U : 1U;
    host_.use(*record.host_entry, ++uses_);
  }
  update_class(record);
  ++uses_;
  if (record.device_entry != nullptr) {
    device_.use(*record.device_entry, uses_);
  }
}

// Takes back what the request has brought in if it cannot become an owner.
TaskOwners::Added PeftCacheManager::add_owner(RequestId request, TaskRecord& record, bool started,
                                              bool was_on_host) {
  try {
    const bool is_first_owner = !record.is_owned();
    const TaskOwners::Added added = owners_.add(request, record, started);
    if (is_first_owner) {
      host_.pin(*record.host_entry);
    }
    return added;
  } catch (...) {  // out of memory, or, if the task was on the host, a conflict
    if (!was_on_host) {
      give_up_copy(Tier::host, record.id());
      forget_if_gone(record.id());
    }
    throw;
  }
}

void PeftCacheManager::mark_request_done(RequestId request, bool pause) {
  const Lock lock = enter();
  const std::optional<TaskOwners::Released> released =
      pause ? owners_.pause(request) : owners_.done(request);
  if (!released) {
    return;
  }
  ++(pause ? iteration_.requests_paused : iteration_.requests_terminated);
  iteration_.tasks_released_device += released->last_active ? 1U : 0U;
  const auto& record = static_cast<const TaskRecord&>(*released->task);
  update_class(record);
  if (released->last) {
    ++iteration_.tasks_released_host;
    host_.unpin(*record.host_entry);  // owners keep it there
  }
}

// Least evictable owner first: active and started, paused, not started or in the window, none.
void PeftCacheManager::update_class(const TaskRecord& record) {
  const std::uint64_t position = record.window_position;
  const EvictionClass in_window =
      position != kNoDistance ? EvictionClass::waiting : EvictionClass::unowned;
  if (record.host_entry != nullptr) {
    host_.set_class(*record.host_entry, in_window, position);
  }
  if (record.device_entry != nullptr) {
    update_device_class(record, in_window);
  }
}

void PeftCacheManager::update_device_class(const TaskRecord& record, EvictionClass in_window) {
  LoraCache::Entry& on_device = *record.device_entry;
  const std::uint64_t position = record.window_position;
  if (!record.is_owned()) {
    device_.set_class(on_device, in_window, position);
  } else if (record.num_started() != 0) {
    device_.set_class(on_device, EvictionClass::active);
  } else if (record.num_paused() != 0) {
    device_.set_class(on_device, EvictionClass::paused);
  } else {
    device_.set_class(on_device, EvictionClass::waiting,
                      std::min(position, kBehindWindow + record.owned_since()));
  }
}

// Which record a request is about to own; everything that can be refused without a load is refused
// here.
PeftCacheManager::TaskRecord& PeftCacheManager::admit_record(RequestId request, TaskId task,
                                                             const CarriedWeights* weights,
                                                             bool started) {
  owners_.check_add(request, task);
  if (weights == nullptr) {
    return require_record(task);
  }
  const TaskRecord* known = find_record(task);
  if (known != nullptr && known->digest.empty()) {
    throw RequestConflictError("task " + std::to_string(task.value) +
                               " is a registered adapter; a request cannot bring weights for it");
  }
  admit_carried(task, *weights, started);
  return require_record(task);
}

void PeftCacheManager::admit_carried(TaskId task, const CarriedWeights& weights, bool started) {
  if (weights.digest.empty()) {
    throw InvalidArgumentError("weights that a request carries need a digest");
  }
  check_plan(*weights.plan);
  TaskRecord record(task, weights.plan->without_source(), weights.digest);
  const auto found = records_.find(task);
  // The shapes are compared as well, so that a digest of too little cannot misplace anything.
  if (found != records_.end() && found->second.digest == weights.digest &&
      found->second.plan->row_shapes() == record.plan->row_shapes()) {
    return;
  }
  check_fits_some_day(record);
  const std::size_t pages = layout_of(record)->num_pages();
  if (found != records_.end()) {
    replace_carried(task, found->second, pages, started);
  }
  largest_pages_ = std::max(largest_pages_, pages);
  shortcuts_.reserve(records_.size() + 1);
  records_.try_emplace(task, task, std::move(record.plan), std::move(record.digest));
}

// Forgets the old weights under a task id, if nobody uses them and the new ones can follow.
void PeftCacheManager::replace_carried(TaskId task, const TaskRecord& old, std::size_t pages,
                                       bool started) {
  if (old.is_owned() || old.user_pins != 0 || old.is_leased()) {
    throw RequestConflictError("task " + std::to_string(task.value) +
                               " is in use with other weights; use another task id for these");
  }
  // The old copy counts as evictable.
  if (const auto shortage = host_shortage(pages, started)) {
    host_.refuse(*shortage);
  }
  for (const Tier tier : {Tier::host, Tier::device}) {
    if (cache_of(tier).find(task) != nullptr) {
      give_up_copy(tier, task);
    }
  }
  std::erase(window_, task);
  shortcuts_.forget(old);
  records_.erase(task);
}

void PeftCacheManager::check_plan(const AdapterPlan& plan) const {
  if (plan.config_fingerprint() != config_->fingerprint()) {
    throw InvalidArgumentError(
        "the adapter was planned for another model configuration than this cache was made for");
  }
}

std::shared_ptr<const Layout> PeftCacheManager::layout_of(TaskRecord& record) {
  return record.layout != nullptr ? record.layout : layouts_.get(record.plan->row_shapes());
}

PeftCacheManager::TaskRecord* PeftCacheManager::find_record(TaskId task) {
  TaskRecord* record = shortcuts_.find(task);
  if (record == nullptr) {
    const auto found = records_.find(task);
    if (found == records_.end()) {
      return nullptr;
    }
    record = &found->second;
    shortcuts_.remember(*record, record->host_entry);
  }
  return record;
}

PeftCacheManager::TaskRecord& PeftCacheManager::require_record(TaskId task) {
  TaskRecord* record = find_record(task);
  if (record == nullptr) {
    throw PeftTaskNotCachedError(task);
  }
  return *record;
}

const PeftCacheManager::TaskRecord& PeftCacheManager::require_record(TaskId task) const {
  return const_cast<PeftCacheManager*>(this)->require_record(task);
}

// Whether evicting everything but what users pinned would make room for the task.
void PeftCacheManager::check_fits_some_day(TaskRecord& record) {
  const std::size_t pages = layout_of(record)->num_pages();
  const std::size_t pinned = user_pinned_pages_ - (record.user_pins != 0 ? pages : 0);
  const std::size_t host_pages = host_.pool().num_pages() - pinned;
  if (pages > host_pages) {
    throw AdapterTooLargeError(host_.tier(), pages, host_pages, params_.page_bytes);
  }
  if (pages > device_.pool().num_pages()) {
    throw AdapterTooLargeError(device_.tier(), pages, device_.pool().num_pages(),
                               params_.page_bytes);
  }
}

// After an eviction, a failed load or the end of an owner: drops what is only needed while the task
// is in a tier, and all of a task that nothing can bring back.
void PeftCacheManager::forget_if_gone(TaskId task) {
  const auto found = records_.find(task);
  if (found == records_.end() || found->second.is_in_a_tier()) {
    return;
  }
  found->second.layout.reset();
  if (found->second.plan->source() == nullptr && !found->second.is_owned()) {
    std::erase(window_, task);
    shortcuts_.forget(found->second);
    records_.erase(found);
  }
}

AdapterState PeftCacheManager::adapter_state(RequestId request) const {
  const Lock lock = enter();
  if (owners_.failure_of(request) != nullptr) {
    return AdapterState::failed;
  }
  const std::optional<TaskId> task = owners_.task_of(request);
  if (!task) {
    return AdapterState::waiting;
  }
  const bool is_resident = host_.is_resident(*task) || device_.is_resident(*task);
  return is_resident ? AdapterState::ready : AdapterState::loading;
}

std::exception_ptr PeftCacheManager::adapter_error(RequestId request) const {
  const Lock lock = enter();
  const TaskOwners::Failure* failure = owners_.failure_of(request);
  return failure == nullptr ? nullptr : failure->error;
}

void PeftCacheManager::pin(TaskId task) {
  const Lock lock = enter();
  check_open();
  TaskRecord& record = require_record(task);
  check_fits_some_day(record);
  if (record.user_pins == 0) {
    const std::size_t pages = layout_of(record)->num_pages();
    const std::size_t left = host_.pool().num_pages() - user_pinned_pages_;
    const std::size_t kept = std::max(largest_pages_, pages);
    if (pages + kept > left) {
      throw LoraCacheFullError::of_pin(host_.tier(), pages, user_pinned_pages_, kept,
                                       host_.pool().num_pages());
    }
    if (record.host_entry == nullptr) {
      bring_into_host(task, record.plan, false);
    } else {
      host_.use(*record.host_entry, ++uses_);
    }
    host_.pin(*record.host_entry);
    user_pinned_pages_ += pages;
  }
  ++record.user_pins;
}

void PeftCacheManager::unpin(TaskId task) {
  const Lock lock = enter();
  TaskRecord& record = require_record(task);
  if (record.user_pins == 0) {
    throw InvalidArgumentError("task " + std::to_string(task.value) + " is not pinned");
  }
  if (--record.user_pins == 0) {
    user_pinned_pages_ -= record.layout->num_pages();
    host_.unpin(*record.host_entry);
  }
}

std::exception_ptr PeftCacheManager::load_error(TaskId task) const {
  const Lock lock = enter();
  return require_record(task).load_error;
}

void PeftCacheManager::check_open() const {
  if (closed_) {
    throw InvalidArgumentError("the PEFT cache manager is closed");
  }
}

}  // namespace pagedlora
