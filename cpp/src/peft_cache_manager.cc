#include "pagedlora/peft_cache_manager.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "internal/page_runs.h"
#include "internal/stopwatch.h"
#include "pagedlora/errors.h"
#include "pagedlora/page_size_search.h"
#include "pagedlora/scatter_plan.h"

namespace pagedlora {
namespace {

LayoutParams choose_layout_params(const LoraModelConfig& config, const PeftCacheSizes& sizes) {
  if (sizes.page_bytes == 0) {
    return search_layout_params(config, std::min(sizes.host_cache_bytes, sizes.device_cache_bytes));
  }
  return {sizes.page_bytes, element_bytes(config.dtype()),
          sizes.max_part_bytes != 0 ? sizes.max_part_bytes : sizes.page_bytes};
}

[[noreturn]] void refuse(const LoraCache& cache, const Shortage& shortage) {
  throw LoraCacheFullError(cache.tier(), shortage.needed_pages, shortage.free_pages,
                           shortage.evictable_pages);
}

}  // namespace

PeftCacheManager::PeftCacheManager(std::shared_ptr<const LoraModelConfig> config,
                                   const PeftCacheSizes& sizes, std::shared_ptr<Device> device,
                                   const PolicyFactory& make_policy)
    : config_(std::move(config)),
      params_(choose_layout_params(*config_, sizes)),
      layouts_(config_, params_),
      host_(make_host_device(), "host", sizes.host_cache_bytes / params_.page_bytes,
            params_.page_bytes, make_policy),
      device_(std::move(device), "device", sizes.device_cache_bytes / params_.page_bytes,
              params_.page_bytes, make_policy),
      chunk_(ScatterPlan::kChunkBytes) {}

PeftCacheManager::~PeftCacheManager() { lock_without_lease(); }

TaskId PeftCacheManager::register_task(std::shared_ptr<const AdapterPlan> plan) {
  const std::scoped_lock lock(mutex_);
  check_open();
  while (records_.contains(TaskId{next_task_})) {
    ++next_task_;
  }
  const TaskId task{next_task_++};
  records_[task].plan = std::move(plan);
  return task;
}

void PeftCacheManager::add_request_peft(RequestId request, TaskId task,
                                        const CarriedWeights* weights) {
  const std::scoped_lock lock(mutex_);
  check_open();
  admit_record(request, task, weights);
  try {
    const TaskRecord& record = records_.at(task);
    bring_into_host(task, weights != nullptr ? *weights->plan : *record.plan);
  } catch (...) {
    forget_if_gone(task);
    throw;
  }
  if (!owners_.has_any(task)) {
    host_.pin(task);
  }
  owners_.add(request, task);
  device_.set_class(task, class_of(task));
}

void PeftCacheManager::mark_request_done(RequestId request, bool pause) {
  const std::scoped_lock lock(mutex_);
  const std::optional<TaskId> task = pause ? owners_.pause(request) : owners_.done(request);
  if (!task) {
    return;
  }
  if (!owners_.has_any(*task)) {
    host_.unpin(*task);
  }
  device_.set_class(*task, class_of(*task));
}

// Which record a request is about to own; everything that can be refused without a load is refused
// here.
void PeftCacheManager::admit_record(RequestId request, TaskId task, const CarriedWeights* weights) {
  owners_.check_add(request, task);
  const auto found = records_.find(task);
  if (found == records_.end() && weights == nullptr) {
    throw PeftTaskNotCachedError(task);
  }
  if (weights != nullptr) {
    if (found != records_.end() && found->second.digest.empty()) {
      throw RequestConflictError("task " + std::to_string(task.value) +
                                 " is a registered adapter; a request cannot bring weights for it");
    }
    admit_carried(task, *weights);
  }
  check_fits_some_day(layout_of(require_record(task))->num_pages());
}

void PeftCacheManager::admit_carried(TaskId task, const CarriedWeights& weights) {
  if (weights.digest.empty()) {
    throw InvalidArgumentError("weights that a request carries need a digest");
  }
  const std::vector<RowShape> shapes = weights.plan->row_shapes();
  const std::size_t num_pages = layouts_.get(shapes)->num_pages();
  check_fits_some_day(num_pages);
  const auto found = records_.find(task);
  // The shapes are compared as well, so that a digest of too little cannot misplace anything.
  if (found != records_.end() &&
      (found->second.digest != weights.digest || found->second.plan->row_shapes() != shapes)) {
    const LoraCache::Entry* leased = device_.find(task);
    if (owners_.has_any(task) || (leased != nullptr && leased->pins != 0)) {
      throw RequestConflictError("task " + std::to_string(task.value) +
                                 " is in use with other weights; use another task id for these");
    }
    // The old copy counts as evictable: if the new one cannot follow it, it stays.
    if (const std::optional<Shortage> shortage = host_.shortage(num_pages)) {
      refuse(host_, *shortage);
    }
    for (LoraCache* cache : {&host_, &device_}) {
      if (cache->find(task) != nullptr) {
        cache->evict(task);
      }
    }
    records_.erase(found);
  }
  TaskRecord& record = records_[task];
  if (record.plan == nullptr) {
    record.plan = weights.plan->without_source();
    record.digest = weights.digest;
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

void PeftCacheManager::check_fits_some_day(std::size_t pages) const {
  for (const LoraCache* cache : {&host_, &device_}) {
    if (pages > cache->pool().num_pages()) {
      throw AdapterTooLargeError(cache->tier(), pages, cache->pool().num_pages(),
                                 params_.page_bytes);
    }
  }
}

void PeftCacheManager::make_room(LoraCache& cache, std::size_t pages) {
  const std::size_t free_before = cache.pool().num_free();
  std::vector<TaskId> evicted;
  if (const std::optional<Shortage> shortage = cache.try_make_room(pages, evicted)) {
    refuse(cache, *shortage);
  }
  TierStats& tier = &cache == &host_ ? stats_.host : stats_.device;
  tier.tasks_evicted += evicted.size();
  tier.pages_evicted += cache.pool().num_free() - free_before;
  for (const TaskId task : evicted) {
    forget_if_gone(task);
  }
}

void PeftCacheManager::bring_into_host(TaskId task, const AdapterPlan& plan) {
  if (host_.is_resident(task)) {
    ++stats_.host.hits;
    host_.touch(task);
    return;
  }
  TaskRecord& record = records_.at(task);
  const bool from_device = device_.is_resident(task);
  if (!from_device && plan.source() == nullptr) {
    throw PeftTaskNotCachedError(task);
  }
  try {
    if (from_device) {
      refill_host_from_device(task, record);
    } else {
      read_source(task, record, plan);
    }
  } catch (const LoraCacheFullError&) {
    throw;  // neither a miss nor a failed load: it was never started, and will be asked for again
  } catch (...) {
    ++stats_.host.misses;
    ++stats_.failed_loads;
    throw;
  }
  ++stats_.host.misses;
}

void PeftCacheManager::read_source(TaskId task, TaskRecord& record, const AdapterPlan& plan) {
  const internal::Stopwatch stopwatch(stats_.host.load_seconds);
  const std::unique_ptr<SourceReader> reader = plan.source()->open();
  std::shared_ptr<const Layout> layout = layout_of(record);
  const ScatterPlan scatter(*config_, plan, *layout);
  make_room(host_, layout->num_pages());
  host_.claim(task, layout->num_pages());
  record.layout = layout;
  try {
    scatter.execute(*reader, config_->dtype(), chunk_, pages_of(host_, task), nullptr);
    reader->finish();
  } catch (...) {
    host_.fail(task);
    forget_if_gone(task);
    throw;
  }
  host_.publish(task);
  stats_.host.bytes_loaded += layout->payload_bytes();
  stats_.source_bytes += scatter.source_bytes();
  ++stats_.source_reads;
  stats_.source_rereads += record.was_read ? 1U : 0U;
  record.was_read = true;
}

void PeftCacheManager::refill_host_from_device(TaskId task, TaskRecord& record) {
  const internal::Stopwatch stopwatch(stats_.host.load_seconds);
  make_room(host_, record.layout->num_pages());
  host_.claim(task, record.layout->num_pages());
  try {
    device_.pool().device().copy_to_host(
        internal::page_runs(pages_of(device_, task), pages_of(host_, task)));
  } catch (...) {
    host_.fail(task);
    throw;
  }
  host_.publish(task);
  stats_.host.bytes_loaded += record.layout->payload_bytes();
}

std::shared_ptr<BatchLease> PeftCacheManager::ensure_batch(std::span<const RequestId> requests,
                                                           bool reset_device_cache) {
  // Made before the lock is taken: when something below throws, its destructor takes the lock.
  auto lease = std::make_shared<BatchLease>(
      config_, [this](const std::vector<BatchLease::LeasedTask>& tasks) { release_lease(tasks); });
  const std::unique_lock lock = lock_without_lease();
  check_open();
  if (reset_device_cache) {
    device_.demote_all();
  }
  const std::vector<TaskId> tasks = resolve_batch(requests, *lease);
  claim_absent(tasks);
  std::unordered_map<TaskId, std::exception_ptr> failed;
  std::unordered_map<TaskId, std::size_t> position;
  for (const TaskId task : tasks) {
    if (!device_.is_resident(task)) {
      try {
        copy_to_device(task);
      } catch (...) {
        failed.emplace(task, std::current_exception());
        continue;
      }
    }
    position.emplace(task, lease->tasks().size());
    lease->add_task({task, pages_of(device_, task)});
  }
  for (const RequestId request : requests) {
    const std::optional<TaskId> task = owners_.task_of(request);
    if (!task || lease->errors().contains(request)) {
      continue;
    }
    if (const auto error = failed.find(*task); error != failed.end()) {
      lease->add_error(request, error->second);
    } else {
      lease->add_request(request, position.at(*task));
    }
  }
  open_lease_ = lease;
  return lease;
}

// The distinct tasks of the requests, in call order; requests that cannot be served get their
// error.
std::vector<TaskId> PeftCacheManager::resolve_batch(std::span<const RequestId> requests,
                                                    BatchLease& lease) {
  std::vector<TaskId> tasks;
  std::set<TaskId> seen;
  for (const RequestId request : requests) {
    const std::optional<TaskId> task = owners_.task_of(request);
    const bool active = task && owners_.sets_of(*task)->active.contains(request);
    if (!active) {
      lease.add_error(request, std::make_exception_ptr(InvalidArgumentError(
                                   "request " + std::to_string(request.value) +
                                   (task ? " is paused" : " was never added") +
                                   ": call add_request_peft before ensure_batch")));
    } else if (seen.insert(*task).second) {
      tasks.push_back(*task);
    }
  }
  return tasks;
}

// Pins what is there and claims pages for the rest: all of it or, with an error, nothing.
void PeftCacheManager::claim_absent(const std::vector<TaskId>& tasks) {
  std::size_t needed = 0;
  std::size_t kept = 0;
  for (const TaskId task : tasks) {
    const LoraCache::Entry* entry = device_.find(task);
    needed += entry == nullptr ? records_.at(task).layout->num_pages() : 0;
    kept += entry != nullptr && entry->pins == 0 ? entry->pages.size() : 0;
  }
  if (const std::optional<Shortage> shortage = device_.shortage(needed, kept)) {
    refuse(device_, *shortage);
  }
  for (const TaskId task : tasks) {
    if (device_.is_resident(task)) {
      ++stats_.device.hits;
      device_.pin(task);
      device_.set_class(task, class_of(task));
    }
  }
  make_room(device_, needed);
  for (const TaskId task : tasks) {
    if (!device_.is_resident(task)) {
      ++stats_.device.misses;
      device_.claim(task, records_.at(task).layout->num_pages());
      device_.pin(task);
    }
  }
}

void PeftCacheManager::copy_to_device(TaskId task) {
  const internal::Stopwatch stopwatch(stats_.device.load_seconds);
  try {
    device_.pool().device().copy_from_host(
        internal::page_runs(pages_of(host_, task), pages_of(device_, task)));
  } catch (...) {
    device_.unpin(task);
    device_.fail(task);
    ++stats_.failed_loads;
    throw;
  }
  device_.set_class(task, class_of(task));
  device_.publish(task);
  stats_.device.bytes_loaded += records_.at(task).layout->payload_bytes();
}

void PeftCacheManager::release_lease(const std::vector<BatchLease::LeasedTask>& tasks) noexcept {
  const std::scoped_lock lock(mutex_);
  for (const BatchLease::LeasedTask& leased : tasks) {
    device_.unpin(leased.task);
  }
}

// Locks the manager at a moment when no lease is open: of two threads that end the same lease, the
// slower one finds the lease of the faster one and ends that as well.
std::unique_lock<std::mutex> PeftCacheManager::lock_without_lease() {
  for (;;) {
    std::shared_ptr<BatchLease> lease;  // outlives the lock: its destructor may take it
    std::unique_lock lock(mutex_);
    lease = open_lease_.lock();
    if (lease == nullptr) {
      return lock;
    }
    open_lease_.reset();
    lock.unlock();
    lease->close();
  }
}

// After an eviction or a failed load: drops what is only needed while the task is in a tier.
void PeftCacheManager::forget_if_gone(TaskId task) {
  const auto found = records_.find(task);
  if (found == records_.end() || host_.find(task) != nullptr || device_.find(task) != nullptr) {
    return;
  }
  found->second.layout.reset();
  if (found->second.plan->source() == nullptr && !owners_.has_any(task)) {
    records_.erase(found);
  }
}

EvictionClass PeftCacheManager::class_of(TaskId task) const {
  if (owners_.has_active(task)) {
    return EvictionClass::active;
  }
  return owners_.has_any(task) ? EvictionClass::paused : EvictionClass::unowned;
}

TaskPages PeftCacheManager::pages_of(const LoraCache& cache, TaskId task) const {
  const TaskRecord& record = records_.at(task);
  return {record.layout.get(), cache.find(task)->pages.data(), record.plan->scales().data(),
          cache.pool().base(), params_.page_bytes};
}

void PeftCacheManager::check_open() const {
  if (closed_) {
    throw InvalidArgumentError("the PEFT cache manager is closed");
  }
}

}  // namespace pagedlora
