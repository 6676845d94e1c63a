#include "lora_kernels.h"

namespace pagedlora::internal {
namespace {

constexpr std::uint32_t kDotLanes = 16;

// Pairs lanes half a width apart, so that compilers may use vectors at every step.
template <std::uint32_t kLanes>
float sum_lanes(float (&lanes)[kLanes]) {
  for (std::uint32_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::uint32_t i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  return lanes[0];
}

template <class X, class W>
float dot(const X* x, const W* w, std::uint32_t length) {
  float lanes[kDotLanes] = {};
  std::uint32_t i = 0;
  for (; i + kDotLanes <= length; i += kDotLanes) {
    for (std::uint32_t lane = 0; lane < kDotLanes; ++lane) {
      lanes[lane] += widen(w[i + lane]) * widen(x[i + lane]);
    }
  }
  for (std::uint32_t lane = 0; i + lane < length; ++lane) {
    lanes[lane] += widen(w[i + lane]) * widen(x[i + lane]);
  }
  return sum_lanes(lanes);
}

template <class X, class W>
void shrink(const ShrinkArgs& args) {
  for (std::uint32_t part = 0; part < args.num_parts; ++part) {
    const auto& [at, bytes, begin, length, rank_count] = args.parts[part];
    const X* x = static_cast<const X*>(args.x) + begin;
    for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
      const W* weights = static_cast<const W*>(at) + static_cast<std::size_t>(rank) * length;
      for (std::uint32_t row = 0; row < args.num_rows; ++row) {
        args.t[row * kRankLanes + rank] += dot(x + row * args.x_row_stride, weights, length);
      }
    }
  }
}

template <class W>
float expand_one(const float* t, const W* weights, std::uint32_t rank_count) {
  float products[kRankLanes] = {};
  if (rank_count == kRankLanes) {
    for (std::uint32_t rank = 0; rank < kRankLanes; ++rank) {
      products[rank] = widen(weights[rank]) * t[rank];
    }
  } else {
    for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
      products[rank] = widen(weights[rank]) * t[rank];
    }
  }
  return sum_lanes(products);
}

template <class X, class W>
void expand(const ExpandArgs& args) {
  for (std::uint32_t row = 0; row < args.num_rows; ++row) {
    X* y = static_cast<X*>(args.y) + row * args.y_row_stride;
    for (std::uint32_t o = 0; o < args.length; ++o) {
      const float* t = args.t + row * kRankLanes;
      float sum = 0.0F;
      for (std::uint32_t block = 0; block < args.num_blocks; ++block) {
        const WeightsPart& part = args.blocks[block];
        const std::size_t skipped = static_cast<std::size_t>(o) * part.rank_count;
        sum += expand_one(t, static_cast<const W*>(part.at) + skipped, part.rank_count);
        t += std::size_t{args.num_rows} * kRankLanes;
      }
      y[o] = narrow<X>(widen(y[o]) + sum);
    }
  }
}

template <class X, class W>
constexpr LoraKernels kKernels{&shrink<X, W>, &expand<X, W>};

// In the order of Dtype.
constexpr LoraKernels kPortableLoraKernels[kNumDtypes][kNumDtypes] = {
    {kKernels<float, float>, kKernels<float, Float16>, kKernels<float, Bfloat16>},
    {kKernels<Float16, float>, kKernels<Float16, Float16>, kKernels<Float16, Bfloat16>},
    {kKernels<Bfloat16, float>, kKernels<Bfloat16, Float16>, kKernels<Bfloat16, Bfloat16>},
};

}  // namespace

const LoraKernels& lora_kernels(Dtype activations, Dtype weights, [[maybe_unused]] Isa isa) {
  const auto x = static_cast<std::size_t>(activations);
  const auto w = static_cast<std::size_t>(weights);
#if defined(PAGEDLORA_HAVE_AVX512)
  if (isa == Isa::avx512) {
    return kAvx512LoraKernels[x][w];
  }
#endif
#if defined(PAGEDLORA_HAVE_AVX2)
  if (isa == Isa::avx2) {
    return kAvx2LoraKernels[x][w];
  }
#endif
  return kPortableLoraKernels[x][w];
}

}  // namespace pagedlora::internal
