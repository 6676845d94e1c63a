// "auto", "portable" or "avx512" as Python spells it.
#pragma once

#include <string_view>

#include "pagedlora/cpu_features.h"

namespace pagedlora::bindings {

// Throws ValueError for an unknown name or one that cannot run here.
Isa isa_argument(std::string_view name);

}  // namespace pagedlora::bindings
