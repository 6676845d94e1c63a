// Marks for code that kernels run as well. To every compiler but nvcc they are nothing.
#pragma once

// NO_INLINE: a variant whose registers the others should not add to theirs.
#if defined(__CUDACC__)
#define PAGEDLORA_HOST_DEVICE __host__ __device__
#define PAGEDLORA_NO_INLINE __noinline__
#else
#define PAGEDLORA_HOST_DEVICE
#define PAGEDLORA_NO_INLINE
#endif

// UNROLL: before a loop whose number of turns is a constant, so that what it indexes stays in
// registers. NO_UNROLL: before one that is not worth more code.
#if defined(__CUDA_ARCH__)
#define PAGEDLORA_UNROLL _Pragma("unroll")
#define PAGEDLORA_NO_UNROLL _Pragma("unroll 1")
#else
#define PAGEDLORA_UNROLL
#define PAGEDLORA_NO_UNROLL
#endif
