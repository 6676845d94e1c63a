// Which instruction set the CPU kernels use: chosen once at run time by our own function pointers
// (no ifunc, so that sanitizers work), the portable one on request.
#pragma once

#include <string_view>

namespace pagedlora {

enum class Isa { portable, avx512 };

// What this processor, operating system and build can run.
Isa best_isa();

// best_isa(), unless the environment variable PAGEDLORA_ISA=portable asks for less. Read once.
Isa default_isa();

constexpr std::string_view isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : "portable"; }

}  // namespace pagedlora
