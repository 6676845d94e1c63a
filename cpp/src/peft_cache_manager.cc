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
      put_workers_(std::make_unique<internal::JobPool>(
          board_, clock_,
          internal::JobPool::Options{options_.num_put_workers, kMaxAbandonedReaders,
                                     ScatterPlan::kChunkBytes, options_.load_timeout})),
      ensure_workers_(std::make_unique<internal::JobPool>(
          board_, clock_,
          internal::JobPool::Options{options_.num_ensure_workers, kMaxAbandonedReaders, 0,
                                     options_.load_timeout})) {}

PeftCacheManager::~PeftCacheManager() { close(); }

TaskId PeftCacheManager::register_task(std::shared_ptr<const AdapterPlan> plan) {
  const std::scoped_lock lock(mutex_);
  check_open();
  check_plan(*plan);
  while (records_.contains(TaskId{next_task_})) {
    ++next_task_;
  }
  const TaskId task{next_task_++};
  TaskRecord record;
  record.plan = std::move(plan);
  largest_pages_ = std::max<std::size_t>(largest_pages_, layout_of(record)->num_pages());
  records_.emplace(task, std::move(record));
  return task;
}

void PeftCacheManager::unregister_task(TaskId task) {
  decltype(records_)::node_type record;  // outlives the lock, as its source may be anybody's
  const std::scoped_lock lock(mutex_);
  const auto found = records_.find(task);
  if (found == records_.end()) {
    return;
  }
  const TaskOwners::Sets* sets = owners_.sets_of(task);
  const LoraCache::Entry* on_device = device_.find(task);
  const bool is_leased = on_device != nullptr && on_device->pins != 0;
  if (sets != nullptr || found->second.user_pins != 0 || is_leased) {
    throw AdapterInUseError(task, sets == nullptr ? 0 : sets->active.size() + sets->paused.size(),
                            found->second.user_pins, is_leased);
  }
  for (const Tier tier : {Tier::host, Tier::device}) {
    if (cache_of(tier).find(task) != nullptr) {
      give_up_copy(tier, task);
    }
  }
  std::erase(window_, task);
  record = records_.extract(task);
}

void PeftCacheManager::add_request_peft(RequestId request, TaskId task,
                                        const CarriedWeights* weights, bool started) {
  const std::scoped_lock lock(mutex_);
  check_open();
  if (owners_.failure_of(request) != nullptr) {
    owners_.check_add(request, task);
    return;
  }
  TaskRecord& record = admit_record(request, task, weights, started);
  LoraCache::Entry* on_host = host_.find(task);
  const bool was_on_host = on_host != nullptr;
  if (was_on_host) {
    ++stats_.host.hits;
    host_.use(*on_host, ++uses_);
  } else {
    bring_into_host(task, weights != nullptr ? weights->plan : record.plan, started);
    on_host = host_.find(task);
  }
  const TaskOwners::Added added = add_owner(request, task, started, *on_host, was_on_host);
  iteration_.requests_resumed += added == TaskOwners::Added::resumed ? 1U : 0U;
  LoraCache::Entry* on_device = device_.find(task);
  update_class(task, record, on_host, on_device);
  ++uses_;
  if (on_device != nullptr) {
    device_.use(*on_device, uses_);
  }
}

// Takes back what the request has brought in if it cannot become an owner.
TaskOwners::Added PeftCacheManager::add_owner(RequestId request, TaskId task, bool started,
                                              LoraCache::Entry& on_host, bool was_on_host) {
  try {
    bool is_first_owner = false;
    const TaskOwners::Added added = owners_.add(request, task, started, &is_first_owner);
    if (is_first_owner) {
      host_.pin(on_host);
    }
    return added;
  } catch (...) {  // out of memory
    if (!was_on_host) {
      give_up_copy(Tier::host, task);
      forget_if_gone(task);
    }
    throw;
  }
}

void PeftCacheManager::mark_request_done(RequestId request, bool pause) {
  const std::scoped_lock lock(mutex_);
  const std::optional<TaskOwners::Released> released =
      pause ? owners_.pause(request) : owners_.done(request);
  if (!released) {
    return;
  }
  ++(pause ? iteration_.requests_paused : iteration_.requests_terminated);
  iteration_.tasks_released_device += released->last_active ? 1U : 0U;
  LoraCache::Entry* on_host = host_.find(released->task);
  if (released->last) {
    ++iteration_.tasks_released_host;
    host_.unpin(*on_host);  // owners keep it there
  }
  update_class(released->task, records_.at(released->task), on_host, device_.find(released->task));
}

void PeftCacheManager::update_class(TaskId task) {
  if (const auto found = records_.find(task); found != records_.end()) {
    update_class(task, found->second, host_.find(task), device_.find(task));
  }
}

// Least evictable owner first: active and started, paused, not started or in the window, none.
// Entries that are absent are nullptr.
void PeftCacheManager::update_class(TaskId task, const TaskRecord& record,
                                    LoraCache::Entry* on_host, LoraCache::Entry* on_device) {
  const std::uint64_t position = record.window_position;
  const EvictionClass in_window =
      position != kNoDistance ? EvictionClass::waiting : EvictionClass::unowned;
  if (on_host != nullptr) {
    host_.set_class(*on_host, in_window, position);
  }
  if (on_device == nullptr) {
    return;
  }
  const TaskOwners::Sets* sets = owners_.sets_of(task);
  if (sets == nullptr) {
    device_.set_class(*on_device, in_window, position);
  } else if (sets->num_started != 0) {
    device_.set_class(*on_device, EvictionClass::active);
  } else if (!sets->paused.empty()) {
    device_.set_class(*on_device, EvictionClass::paused);
  } else {
    device_.set_class(*on_device, EvictionClass::waiting,
                      std::min(position, kBehindWindow + sets->owned_since));
  }
}

// Which record a request is about to own; everything that can be refused without a load is refused
// here.
PeftCacheManager::TaskRecord& PeftCacheManager::admit_record(RequestId request, TaskId task,
                                                             const CarriedWeights* weights,
                                                             bool started) {
  owners_.check_add(request, task);
  const auto found = records_.find(task);
  if (weights == nullptr) {
    if (found == records_.end()) {
      throw PeftTaskNotCachedError(task);
    }
    return found->second;
  }
  if (found != records_.end() && found->second.digest.empty()) {
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
  TaskRecord record;
  record.plan = weights.plan->without_source();
  record.digest = weights.digest;
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
  records_.try_emplace(task, std::move(record));
}

// Forgets the old weights under a task id, if nobody uses them and the new ones can follow.
void PeftCacheManager::replace_carried(TaskId task, const TaskRecord& old, std::size_t pages,
                                       bool started) {
  const LoraCache::Entry* on_device = device_.find(task);
  if (owners_.has_any(task) || old.user_pins != 0 ||
      (on_device != nullptr && on_device->pins != 0)) {
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

PeftCacheManager::TaskRecord& PeftCacheManager::require_record(TaskId task) {
  const auto found = records_.find(task);
  if (found == records_.end()) {
    throw PeftTaskNotCachedError(task);
  }
  return found->second;
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
  if (found == records_.end() || host_.find(task) != nullptr || device_.find(task) != nullptr) {
    return;
  }
  found->second.layout.reset();
  if (found->second.plan->source() == nullptr && !owners_.has_any(task)) {
    std::erase(window_, task);
    records_.erase(found);
  }
}

AdapterState PeftCacheManager::adapter_state(RequestId request) const {
  const std::scoped_lock lock(mutex_);
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
  const std::scoped_lock lock(mutex_);
  const TaskOwners::Failure* failure = owners_.failure_of(request);
  return failure == nullptr ? nullptr : failure->error;
}

void PeftCacheManager::pin(TaskId task) {
  const std::scoped_lock lock(mutex_);
  check_open();
  TaskRecord& record = require_record(task);
  check_fits_some_day(record);
  if (record.user_pins == 0) {
    const std::size_t pages = layout_of(record)->num_pages();
    const std::size_t left = host_.pool().num_pages() - user_pinned_pages_;
    const std::size_t kept = std::max(largest_pages_, pages);
    if (pages + kept > left) {
      throw LoraCacheFullError(host_.tier(), pages + kept, left, 0);
    }
    if (host_.find(task) == nullptr) {
      bring_into_host(task, record.plan, false);
    } else {
      host_.use(task, ++uses_);
    }
    host_.pin(task);
    user_pinned_pages_ += pages;
  }
  ++record.user_pins;
}

void PeftCacheManager::unpin(TaskId task) {
  const std::scoped_lock lock(mutex_);
  TaskRecord& record = require_record(task);
  if (record.user_pins == 0) {
    throw InvalidArgumentError("task " + std::to_string(task.value) + " is not pinned");
  }
  if (--record.user_pins == 0) {
    user_pinned_pages_ -= record.layout->num_pages();
    host_.unpin(task);
  }
}

std::exception_ptr PeftCacheManager::load_error(TaskId task) const {
  const std::scoped_lock lock(mutex_);
  return require_record(task).load_error;
}

void PeftCacheManager::check_open() const {
  if (closed_) {
    throw InvalidArgumentError("the PEFT cache manager is closed");
  }
}

}  // namespace pagedlora
