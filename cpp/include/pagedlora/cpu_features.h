// Which instruction set the CPU kernels use: chosen once at run time by our own function pointers
// (no ifunc, so that sanitizers work), a lesser one on request.
#pragma once

#include <string_view>

namespace pagedlora {

// In ascending order: a processor that runs one of them runs those before it.
enum class Isa {
  portable,
  avx2,   // with FMA and F16C
  avx512  // F, BW, DQ and VL
};

inline constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512};

// The last that this processor, operating system and build can run.
Isa best_isa();

// best_isa(), unless the environment variable PAGEDLORA_ISA names a lesser one. Read once; other
// values change nothing.
Isa default_isa();

constexpr std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace pagedlora
