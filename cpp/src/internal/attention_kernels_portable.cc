#include <algorithm>
#include <cmath>
#include <cstring>

#include "internal/attention_kernels.h"

namespace pagedlora::internal {
namespace {

template <class Element>
void widen_rows(const void* const* rows, int num_rows, int dim, float* out,
                std::ptrdiff_t out_stride) {
  const int padded_dim = (dim + kLanes - 1) / kLanes * kLanes;
  for (int i = 0; i < num_rows; ++i, out += out_stride) {
    const auto* row = static_cast<const Element*>(rows[i]);
    for (int d = 0; d < dim; ++d) {
      out[d] = widen(row[d]);
    }
    std::fill(out + dim, out + padded_dim, 0.0F);
  }
}

template <class Element>
void pack_keys(const void* const* rows, int num_keys, int dim, float* out) {
  for (int i = 0; i < num_keys; ++i) {
    const auto* row = static_cast<const Element*>(rows[i]);
    for (int d = 0; d < dim; ++d) {
      out[d * kKeyTile + i] = widen(row[d]);
    }
  }
}

void multiply_row(const float* a, const float* b, std::ptrdiff_t b_stride, int depth, float* c) {
  float total[kLanes];
  std::memcpy(total, c, sizeof(total));
  for (int k = 0; k < depth; ++k, b += b_stride) {
    for (int j = 0; j < kLanes; ++j) {
      total[j] += a[k] * b[j];
    }
  }
  std::memcpy(c, total, sizeof(total));
}

void multiply(const RowProduct& product) {
  for (int i = 0; i < product.rows; ++i) {
    const float* a = product.a + i * product.a_stride;
    float* c = product.c + i * product.c_stride;
    for (int j = 0; j < product.columns; ++j) {
      c[j] = product.row_scale == nullptr ? 0.0F : c[j] * product.row_scale[i];
    }
    for (int j = 0; j < product.columns; j += kLanes) {
      multiply_row(a, product.b + j, product.b_stride, product.depth, c + j);
    }
  }
}

void softmax_row(const SoftmaxStep& step, float* scores, float& maximum, float* sums,
                 float& rescale) {
  float new_maximum = maximum;
  for (int k = step.first_key; k < step.end_key; ++k) {
    scores[k] *= step.scaling;
    if (step.softcap != 0.0F) {
      scores[k] = step.softcap * std::tanh(scores[k] / step.softcap);
    }
    new_maximum = std::max(new_maximum, scores[k]);
  }
  // While every score is -infinity there is no maximum to subtract: the weights are zero.
  const float reference = new_maximum == kMinusInfinity ? 0.0F : new_maximum;
  rescale = std::exp(maximum - reference);
  maximum = new_maximum;
  for (int lane = 0; lane < kLanes; ++lane) {
    sums[lane] *= rescale;
  }
  for (int k = step.first_key; k < step.end_key; ++k) {
    scores[k] = std::exp(scores[k] - reference);
    sums[k % kLanes] += scores[k];
  }
}

void softmax(const SoftmaxStep& step) {
  for (int i = 0; i < step.rows; ++i) {
    softmax_row(step, step.scores + i * kKeyTile, step.maximum[i], step.sums + i * kLanes,
                step.rescale[i]);
  }
}

template <class Element>
void store_row(const float* values, const float* sums, int dim, void* out) {
  float total = 0.0F;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += sums[lane];
  }
  auto* elements = static_cast<Element*>(out);
  for (int d = 0; d < dim; ++d) {
    elements[d] = narrow<Element>(values[d] / total);
  }
}

template <class Element>
constexpr AttentionKernels kTable = {widen_rows<Element>, pack_keys<Element>, multiply, softmax,
                                     store_row<Element>};

}  // namespace

const AttentionKernels& attention_kernels_portable(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
      return kTable<Float16>;
    case Dtype::bfloat16:
      return kTable<Bfloat16>;
    case Dtype::float32:
      break;
  }
  return kTable<float>;
}

const AttentionKernels& attention_kernels(Isa isa, Dtype dtype) {
#if defined(PAGEDLORA_HAVE_AVX512)
  if (isa == Isa::avx512) {
    return attention_kernels_avx512(dtype);
  }
#endif
#if defined(PAGEDLORA_HAVE_AVX2)
  if (isa == Isa::avx2) {
    return attention_kernels_avx2(dtype);
  }
#endif
  static_cast<void>(isa);
  return attention_kernels_portable(dtype);
}

}  // namespace pagedlora::internal
