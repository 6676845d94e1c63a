// Compiled with AVX-512 flags: everything but the table has internal linkage (see avx512_lanes.h).
#if defined(PAGEDLORA_HAVE_AVX512)

#include "avx512_lora_expand.h"
#include "avx512_lora_shrink.h"
#include "lora_kernels.h"

namespace pagedlora::internal {
namespace {

template <class X, class W>
constexpr LoraKernels kKernels{&shrink<X, W>, &expand<X, W>};

}  // namespace

const LoraKernels kAvx512LoraKernels[kNumDtypes][kNumDtypes] = {
    {kKernels<float, float>, kKernels<float, Float16>, kKernels<float, Bfloat16>},
    {kKernels<Float16, float>, kKernels<Float16, Float16>, kKernels<Float16, Bfloat16>},
    {kKernels<Bfloat16, float>, kKernels<Bfloat16, Float16>, kKernels<Bfloat16, Bfloat16>},
};

}  // namespace pagedlora::internal

#endif
