#include "pagedlora/copy_2d.h"

#include <cstring>
#include <type_traits>

#include "internal/copy_kernels.h"

namespace pagedlora {
namespace internal {

CopyKernel copy_kernel(Dtype source_dtype, Dtype target_dtype, [[maybe_unused]] Isa isa) {
#if defined(PAGEDLORA_HAVE_AVX512)
  if (isa == Isa::avx512) {
    return avx512_copy_kernel(source_dtype, target_dtype);
  }
#endif
#if defined(PAGEDLORA_HAVE_AVX2)
  if (isa == Isa::avx2) {
    return avx2_copy_kernel(source_dtype, target_dtype);
  }
#endif
  return portable_copy_kernel(source_dtype, target_dtype);
}

// Streaming stores are weakly ordered: a release does not order them.
void finish_copies() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace internal

namespace {

template <class From, class To>
bool transpose(const Transpose2d& copy) {
  bool fits = true;
  for (std::size_t row = 0; row < copy.rows; ++row) {
    const std::byte* source = copy.source + row * copy.source_stride_bytes;
    for (std::size_t column = 0; column < copy.columns; ++column) {
      From value;
      std::memcpy(&value, source + column * sizeof(From), sizeof(From));
      const float wide = widen(value);
      if constexpr (std::is_same_v<To, Float16>) {
        fits = fits && !overflows_float16(wide);
      }
      const To narrowed = [&] {
        if constexpr (std::is_same_v<From, To>) {
          return value;  // bit for bit
        } else {
          return narrow<To>(wide);
        }
      }();
      const std::size_t at = (column * copy.target_stride + row) * sizeof(To);
      std::memcpy(copy.target + at, &narrowed, sizeof(To));
      if (copy.second_target != nullptr) {
        std::memcpy(copy.second_target + at, &narrowed, sizeof(To));
      }
    }
  }
  return fits;
}

template <class From>
bool transpose_from(const Transpose2d& copy, Dtype target_dtype) {
  switch (target_dtype) {
    case Dtype::float32:
      return transpose<From, float>(copy);
    case Dtype::float16:
      return transpose<From, Float16>(copy);
    case Dtype::bfloat16:
      return transpose<From, Bfloat16>(copy);
  }
  return false;
}

}  // namespace

bool transpose_2d(const Transpose2d& copy, Dtype source_dtype, Dtype target_dtype) {
  switch (source_dtype) {
    case Dtype::float32:
      return transpose_from<float>(copy, target_dtype);
    case Dtype::float16:
      return transpose_from<Float16>(copy, target_dtype);
    case Dtype::bfloat16:
      return transpose_from<Bfloat16>(copy, target_dtype);
  }
  return false;
}

bool copy_2d(std::span<const Copy2d> copies, Dtype source_dtype, Dtype target_dtype, Isa isa) {
  const bool fits =
      internal::copy_kernel(source_dtype, target_dtype, isa)(copies.data(), copies.size());
  internal::finish_copies();
  return fits;
}

}  // namespace pagedlora
