// The variants behind copy_2d: one function per pair of types and instruction set.
//
// A kernel receives a Copy2d with at least one row and one element; rows that lie back to back in
// the source arrive as one long row. It returns false if a finite value overflowed float16.
//
// Pure functions; thread-safe.
#pragma once

#include "pagedlora/copy_2d.h"
#include "pagedlora/dtype.h"

namespace pagedlora::internal {

using CopyKernel = bool (*)(const Copy2d&);

CopyKernel portable_copy_kernel(Dtype source_dtype, Dtype target_dtype);

#if defined(PAGEDLORA_HAVE_AVX512)
// Needs AVX-512 F, BW, DQ and VL: call only when best_isa() says so.
CopyKernel avx512_copy_kernel(Dtype source_dtype, Dtype target_dtype);
#endif

}  // namespace pagedlora::internal
