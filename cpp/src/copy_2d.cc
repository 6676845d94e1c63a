#include "pagedlora/copy_2d.h"

#include "internal/copy_kernels.h"

namespace pagedlora {
namespace {

internal::CopyKernel choose_kernel(Dtype source_dtype, Dtype target_dtype,
                                   [[maybe_unused]] Isa isa) {
#if defined(PAGEDLORA_HAVE_AVX512)
  if (isa == Isa::avx512) {
    return internal::avx512_copy_kernel(source_dtype, target_dtype);
  }
#endif
#if defined(PAGEDLORA_HAVE_AVX2)
  if (isa == Isa::avx2) {
    return internal::avx2_copy_kernel(source_dtype, target_dtype);
  }
#endif
  return internal::portable_copy_kernel(source_dtype, target_dtype);
}

}  // namespace

bool copy_2d(std::span<const Copy2d> copies, Dtype source_dtype, Dtype target_dtype, Isa isa) {
  return choose_kernel(source_dtype, target_dtype, isa)(copies.data(), copies.size());
}

}  // namespace pagedlora
