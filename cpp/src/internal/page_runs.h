// The copies that bring a task from its pages in one tier to its pages in another.
#pragma once

#include <vector>

#include "pagedlora/device.h"
#include "pagedlora/layout.h"

namespace pagedlora::internal {

// Neighbouring pages of both sides become one run.
inline std::vector<CopyRun> page_runs(const TaskPages& from, const TaskPages& to) {
  std::vector<CopyRun> runs;
  for (std::uint32_t page = 0; page < from.layout->num_pages(); ++page) {
    const CopyRun run{from.address({page, 0}), to.address({page, 0}), from.page_bytes};
    if (!runs.empty() && runs.back().source + runs.back().bytes == run.source &&
        runs.back().target + runs.back().bytes == run.target) {
      runs.back().bytes += run.bytes;
    } else {
      runs.push_back(run);
    }
  }
  return runs;
}

}  // namespace pagedlora::internal
