#include "lora_lookup.h"

#include <span>

#include "lora_kernels.h"

namespace pagedlora::internal {
namespace {

template <class W>
void widen_column(const std::byte* column, std::uint32_t ranks, float* t) {
  const auto* weights = reinterpret_cast<const W*>(column);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    t[rank] = widen(weights[rank]);
  }
}

}  // namespace

void look_up(const LookUpArgs& args) {
  const Dtype dtype = args.task->dtype;
  const std::span<const Part> parts = args.task->layout->a_parts(*args.block);
  const std::uint32_t ranks = args.block->rank_count;
  const std::uint32_t tile = parts.front().length;  // of all but the last
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    const std::int64_t feature = args.token_ids[row] - std::int64_t{args.vocabulary.offset};
    if (feature < 0 || feature >= std::int64_t{args.vocabulary.length}) {
      continue;
    }
    const Part& part = parts[static_cast<std::uint32_t>(feature) / tile];
    const std::size_t skipped =
        (static_cast<std::uint32_t>(feature) - part.begin) * std::size_t{ranks};
    const std::byte* column = args.task->address(part.at) + skipped * element_bytes(dtype);
    float* t = args.t + std::size_t{row} * kRankLanes;
    switch (dtype) {
      case Dtype::float32:
        widen_column<float>(column, ranks, t);
        break;
      case Dtype::float16:
        widen_column<Float16>(column, ranks, t);
        break;
      case Dtype::bfloat16:
        widen_column<Bfloat16>(column, ranks, t);
        break;
    }
  }
}

}  // namespace pagedlora::internal
