// Marks for code that kernels run as well. To every compiler but nvcc they are nothing.
#pragma once

#if defined(__CUDACC__)
#define PAGEDLORA_HOST_DEVICE __host__ __device__
#define PAGEDLORA_NO_INLINE __noinline__  // a variant whose registers others should not add to theirs
#else
#define PAGEDLORA_HOST_DEVICE
#define PAGEDLORA_NO_INLINE
#endif

// Before a loop whose number of turns is a constant: what it indexes stays in registers. And before
// one that is not worth more code.
#if defined(__CUDA_ARCH__)
#define PAGEDLORA_UNROLL _Pragma("unroll")
#define PAGEDLORA_NO_UNROLL _Pragma("unroll 1")
#else
#define PAGEDLORA_UNROLL
#define PAGEDLORA_NO_UNROLL
#endif
