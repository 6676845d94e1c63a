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
  return internal::portable_copy_kernel(source_dtype, target_dtype);
}

}  // namespace

bool copy_2d(const Copy2d& copy, Dtype source_dtype, Dtype target_dtype, Isa isa) {
  if (copy.rows == 0 || copy.row_elements == 0) {
    return true;
  }
  Copy2d work = copy;
  if (copy.source_stride_bytes == copy.row_elements * element_bytes(source_dtype)) {
    work.row_elements *= work.rows;
    work.rows = 1;
  }
  return choose_kernel(source_dtype, target_dtype, isa)(work);
}

}  // namespace pagedlora
