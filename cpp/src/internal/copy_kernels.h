// The variants behind copy_2d: one function per pair of types and instruction set.
//
// A kernel executes `count` copies and returns false if a finite value overflowed float16. What it
// wrote past the caches is complete for other threads after finish_copies() by the same thread, whatever
// lock is released before.
//
// Pure functions; thread-safe.
#pragma once

#include "pagedlora/copy_2d.h"
#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"

namespace pagedlora::internal {

using CopyKernel = bool (*)(const Copy2d* copies, std::size_t count);

// The one that copy_2d() uses for this instruction set.
CopyKernel copy_kernel(Dtype source_dtype, Dtype target_dtype, Isa isa = default_isa());

void finish_copies();

CopyKernel portable_copy_kernel(Dtype source_dtype, Dtype target_dtype);

#if defined(PAGEDLORA_HAVE_AVX2)
// Needs AVX2, FMA and F16C: call only when best_isa() is at least that.
CopyKernel avx2_copy_kernel(Dtype source_dtype, Dtype target_dtype);
#endif

#if defined(PAGEDLORA_HAVE_AVX512)
// Needs AVX-512 F, BW, DQ and VL: call only when best_isa() says so.
CopyKernel avx512_copy_kernel(Dtype source_dtype, Dtype target_dtype);
#endif

}  // namespace pagedlora::internal
