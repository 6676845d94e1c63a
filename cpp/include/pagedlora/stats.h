// Cumulative counters of a manager, each counted once per real event. Plain values.
#pragma once

#include <cstdint>

namespace pagedlora {

struct TierStats {
  std::uint64_t hits = 0;    // the task was resident when it was asked for
  std::uint64_t misses = 0;  // it had to be brought in
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

}  // namespace pagedlora
