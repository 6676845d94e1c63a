#include "lora_combine.h"

#include <algorithm>
#include <cstring>

namespace pagedlora::internal {
namespace {

template <class Y>
void combine_rows(const CombineArgs& args) {
  const auto* base_bias = static_cast<const Y*>(args.base_bias);
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    const float* product = args.scaled_product + std::size_t{row} * args.length;
    Y* y = static_cast<Y*>(args.y) + row * args.y_row_stride;
    for (std::uint32_t o = 0; o < args.length; ++o) {
      const float before = widen(y[o]);
      float delta = product[o] + (args.scaled_bias == nullptr ? 0.0F : args.scaled_bias[o]);
      if (args.dora_scale != nullptr) {
        const float bias = base_bias == nullptr ? 0.0F : widen(base_bias[o]);
        delta = (args.dora_scale[o] - 1.0F) * (before - bias) + args.dora_scale[o] * delta;
      }
      y[o] = narrow<Y>(before + delta);
    }
  }
}

}  // namespace

void combine(const CombineArgs& args, Dtype activations) {
  switch (activations) {
    case Dtype::float32:
      return combine_rows<float>(args);
    case Dtype::float16:
      return combine_rows<Float16>(args);
    case Dtype::bfloat16:
      return combine_rows<Bfloat16>(args);
  }
}

void copy_features(const TaskPages& task, std::span<const Part> parts, std::uint32_t begin,
                   std::uint32_t length, float* into) {
  const std::uint32_t end = begin + length;
  for (const Part& part : parts) {
    const std::uint32_t from = std::max(part.begin, begin);
    const std::uint32_t to = std::min(part.begin + part.length, end);
    if (from < to) {
      std::memcpy(into + (from - begin),
                  task.address(part.at) + (from - part.begin) * sizeof(float),
                  (to - from) * sizeof(float));
    }
  }
}

}  // namespace pagedlora::internal
