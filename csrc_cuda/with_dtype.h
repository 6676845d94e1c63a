// From a Dtype to a template argument.
//
// Pure function; thread-safe.
#pragma once

#include <stdexcept>

#include "pagedlora/dtype.h"

namespace pagedlora::cuda {

// function(value) with a value of the element type, for its type.
template <class Function>
auto with_dtype(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::float32:
      return function(float{});
    case Dtype::float16:
      return function(Float16{});
    case Dtype::bfloat16:
      return function(Bfloat16{});
  }
  throw std::logic_error("no such Dtype");
}

}  // namespace pagedlora::cuda
