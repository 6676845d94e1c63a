// An instruction set as Python spells it: "auto", or a name of isa_name().
#pragma once

#include <string_view>

#include "pagedlora/cpu_features.h"

namespace pagedlora::bindings {

// Throws InvalidArgumentError for an unknown name or one that cannot run here.
Isa isa_argument(std::string_view name);

}  // namespace pagedlora::bindings
