// Every type of stored weights and of activations.
#pragma once

#include <array>

#include "pagedlora/dtype.h"

namespace pagedlora::testing_support {

inline constexpr std::array kDtypes{Dtype::float32, Dtype::float16, Dtype::bfloat16};

}  // namespace pagedlora::testing_support
