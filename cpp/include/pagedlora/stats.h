// Cumulative counters of a manager, each counted once per real event. Plain values.
#pragma once

#include <cstdint>

namespace pagedlora {

struct TierStats {
  std::uint64_t hits = 0;  // it was there, or on its way, when a request was added or a batch asked
  std::uint64_t misses = 0;        // it was not: a load had to be started
  std::uint64_t tasks_loaded = 0;  // were brought in, for a miss or ahead of one
  std::uint64_t tasks_evicted = 0;
  std::uint64_t pages_evicted = 0;
  std::uint64_t bytes_loaded = 0;  // of adapter weights written into the tier
  double load_seconds = 0;
};

struct PeftCacheStats {
  TierStats host;
  TierStats device;
  std::uint64_t source_reads = 0;    // whole adapters read from their source
  std::uint64_t source_rereads = 0;  // of them, those read before
  std::uint64_t source_bytes = 0;
  std::uint64_t failed_loads = 0;
};

// What happened since these were last asked for, and how things stand now. The names are
// TensorRT-LLM's (requestsPaused, ...), in our spelling.
struct IterationStats {
  // Since the last time.
  std::uint64_t requests_paused = 0;
  std::uint64_t requests_resumed = 0;
  std::uint64_t requests_terminated = 0;
  std::uint64_t tasks_released_device = 0;  // lost their last active owner
  std::uint64_t tasks_released_host = 0;    // lost their last owner
  std::uint64_t tasks_evicted_device = 0;
  std::uint64_t pages_evicted_device = 0;
  std::uint64_t tasks_evicted_host = 0;
  std::uint64_t pages_evicted_host = 0;
  // Now.
  std::uint64_t device_pages_total = 0;
  std::uint64_t device_pages_available = 0;  // free
  std::uint64_t host_pages_total = 0;
  std::uint64_t host_pages_available = 0;
  std::uint64_t device_tasks_in_progress = 0;  // on the device, with an active owner
  std::uint64_t device_tasks_done = 0;         // on the device, without one
  std::uint64_t active_tasks = 0;
  std::uint64_t paused_tasks = 0;
};

}  // namespace pagedlora
