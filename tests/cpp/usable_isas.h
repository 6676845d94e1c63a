// The instruction sets that this processor and build can run: what a test of every variant visits.
#pragma once

#include <vector>

#include "pagedlora/cpu_features.h"

namespace pagedlora::testing_support {

inline std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : kIsas) {
    if (isa <= best_isa()) {
      isas.push_back(isa);
    }
  }
  return isas;
}

}  // namespace pagedlora::testing_support
