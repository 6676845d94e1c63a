// Seeds and sizes of the property tests: fixed, so that a run can be repeated, and overridable.
//
// PAGEDLORA_TEST_SEED=n runs only seed n. PAGEDLORA_TEST_SCALE=x multiplies the number of steps.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace pagedlora::testing_support {

inline std::vector<std::uint32_t> seeds(std::uint32_t count) {
  if (const char* seed = std::getenv("PAGEDLORA_TEST_SEED")) {
    return {static_cast<std::uint32_t>(std::stoul(seed))};
  }
  std::vector<std::uint32_t> all(count);
  std::iota(all.begin(), all.end(), 1U);
  return all;
}

// For SCOPED_TRACE, so that a failure says how to repeat it.
inline std::string seed_label(std::uint32_t seed) {
  return "repeat with PAGEDLORA_TEST_SEED=" + std::to_string(seed);
}

// Steps of a random walk; sanitizers get fewer.
inline int num_steps(int plain) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr double kShare = 0.1;
#else
  constexpr double kShare = 1.0;
#endif
  const char* scale = std::getenv("PAGEDLORA_TEST_SCALE");
  return static_cast<int>(plain * kShare * (scale == nullptr ? 1.0 : std::stod(scale)));
}

}  // namespace pagedlora::testing_support
