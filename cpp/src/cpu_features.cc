#include "pagedlora/cpu_features.h"

#include <cstdlib>

namespace pagedlora {

Isa best_isa() {
#if defined(PAGEDLORA_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
#endif
  return Isa::portable;
}

Isa default_isa() {
  static const Isa isa = [] {
    const char* wanted = std::getenv("PAGEDLORA_ISA");
    const bool portable = wanted != nullptr && std::string_view(wanted) == "portable";
    return portable ? Isa::portable : best_isa();
  }();
  return isa;
}

}  // namespace pagedlora
