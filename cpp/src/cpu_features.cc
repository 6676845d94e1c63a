#include "pagedlora/cpu_features.h"

#include <algorithm>
#include <cstdlib>

namespace pagedlora {
namespace {

bool has_avx2() {
#if defined(PAGEDLORA_HAVE_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(PAGEDLORA_HAVE_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

Isa best_isa() {
  if (!has_avx2()) {
    return Isa::portable;
  }
  return has_avx512() ? Isa::avx512 : Isa::avx2;
}

Isa default_isa() {
  static const Isa isa = [] {
    const char* wanted = std::getenv("PAGEDLORA_ISA");
    for (const Isa each : kIsas) {
      if (wanted != nullptr && wanted == isa_name(each)) {
        return std::min(each, best_isa());
      }
    }
    return best_isa();
  }();
  return isa;
}

}  // namespace pagedlora
