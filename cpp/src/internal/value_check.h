// Whether stored values are what an adapter can have: finite, and finite in the type of the cache.
//
// Pure function; thread-safe.
#pragma once

#include <cstddef>

#include "pagedlora/dtype.h"

namespace pagedlora::internal {

enum class ValueProblem { none, not_finite, over_range };

// The worst of `count` values, little-endian, at any alignment. `target` is the type that they are
// rounded to.
ValueProblem find_problem(const std::byte* values, std::size_t count, Dtype source, Dtype target);

}  // namespace pagedlora::internal
