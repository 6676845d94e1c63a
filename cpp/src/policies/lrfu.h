// Least recently and frequently used: uses count, old ones less and less.
#pragma once

#include <memory>

#include "pagedlora/eviction_policy.h"

namespace pagedlora::internal {

std::unique_ptr<EvictionPolicy> make_lrfu_policy();

}  // namespace pagedlora::internal
