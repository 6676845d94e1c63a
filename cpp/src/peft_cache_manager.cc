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
  if (sizes.page_bytes != 0) {
    return checked({sizes.page_bytes, element_bytes(config.dtype()), sizes.max_part_bytes});
  }
  return search_layout_params(config, std::min(sizes.host_cache_bytes, sizes.device_cache_bytes));
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
  check_plan(*plan);
  while (records_.contains(TaskId{next_task_})) {
    ++next_task_;
  }
  const TaskId task{next_task_++};
  records_.emplace(task, TaskRecord{std::move(plan), nullptr, {}, false});
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
  const bool was_owned = owners_.has_any(task);
  owners_.add(request, task);
  if (!was_owned) {
    host_.pin(task);
  }
  device_.set_class(task, class_of(task));
  device_.use(task, ++uses_);
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
  check_plan(*weights.plan);
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
      host_.refuse(*shortage);
    }
    for (LoraCache* cache : {&host_, &device_}) {
      if (cache->find(task) != nullptr) {
        cache->evict(task);
      }
    }
    records_.erase(found);
  }
  if (!records_.contains(task)) {
    records_.emplace(task,
                     TaskRecord{weights.plan->without_source(), nullptr, weights.digest, false});
  }
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
    cache.refuse(*shortage);
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
    host_.use(task, ++uses_);
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
  host_.claim(task, layout->num_pages(), ++uses_);
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
  host_.claim(task, record.layout->num_pages(), ++uses_);
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
  return {record.layout.get(),          cache.find(task)->pages.data(),
          record.plan->scales().data(), cache.pool().base(),
          params_.page_bytes,           config_->dtype()};
}

void PeftCacheManager::check_open() const {
  if (closed_) {
    throw InvalidArgumentError("the PEFT cache manager is closed");
  }
}

}  // namespace pagedlora
