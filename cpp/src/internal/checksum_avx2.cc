// Compiled with AVX2 flags: nothing but the kernel has external linkage.
#if defined(PAGEDLORA_HAVE_AVX2)

#include "internal/checksum_lines.h"

namespace pagedlora::internal {

void avx2_checksum_kernel(const std::byte* from, std::size_t num_lines, ChecksumSums& into) {
  using Vector = std::uint64_t __attribute__((vector_size(32)));
  add_checksum_lines<Vector>(from, num_lines, into);
}

}  // namespace pagedlora::internal

#endif  // PAGEDLORA_HAVE_AVX2
