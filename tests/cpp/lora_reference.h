// What LoraOperator should add to y, evaluated in float64 from its definition.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "lora_operator_fixture.h"
#include "lora_rounding.h"

namespace pagedlora::testing_support {

// Of biases and DoRA scales, beside those of the products.
inline constexpr double kCombineRoundings = 6;

// How many elements of `after` are further from the exact y += LoRA(x) of all the adapter's rows
// for the module than rounding explains. Every row may round y once. `bound_of(layout, row)` is what
// the kernels promise of a row.
template <class BoundOf>
int num_wrong_by_bound(const BoundOf& bound_of, const Adapter& adapter, ModuleIndex module,
                       const Matrix& x, const Matrix& before, const Matrix& after,
                       const Matrix* base_bias = nullptr) {
  const auto [first_row, end_row] = adapter.layout().rows_of(module);
  int wrong = 0;
  for (std::uint32_t token = 0; token < x.rows(); ++token) {
    std::vector<double> exact(before.features());
    std::vector<double> magnitude(before.features());
    std::vector<double> allowed(before.features());
    for (std::uint32_t o = 0; o < before.features(); ++o) {
      exact[o] = before.get(token, o);
      magnitude[o] = std::abs(exact[o]);
    }
    for (std::uint32_t row = first_row; row < end_row; ++row) {
      const Adapter::Row& weights = adapter.rows[row];
      const double scale = adapter.scales[row];
      const double bound = bound_of(adapter.layout(), row);
      for (std::uint32_t o = 0; o < weights.out; ++o) {
        double sum = 0;
        double sum_magnitude = 0;
        for (std::uint32_t rank = 0; rank < weights.rank; ++rank) {
          for (std::uint32_t i = 0; i < weights.in; ++i) {
            const double term = scale * weights.b[o * weights.rank + rank] *
                                weights.a[rank * weights.in + i] *
                                x.get(token, weights.in_offset + i);
            sum += term;
            sum_magnitude += std::abs(term);
          }
        }
        if (!weights.bias.empty()) {
          sum += scale * weights.bias[o];
          sum_magnitude += std::abs(scale * weights.bias[o]);
        }
        const std::uint32_t at = weights.out_offset + o;
        if (!weights.dora_scale.empty()) {
          const double g = weights.dora_scale[o];
          const double bias = base_bias == nullptr ? 0.0 : base_bias->get(0, at);
          sum = (g - 1) * (exact[at] - bias) + g * sum;
          sum_magnitude =
              (std::abs(g) + 1) * (magnitude[at] + std::abs(bias)) + std::abs(g) * sum_magnitude;
        }
        exact[at] += sum;
        magnitude[at] += sum_magnitude;
        allowed[at] += (bound + kCombineRoundings * 0x1p-24) * magnitude[at];
        if (x.dtype() != Dtype::float32) {
          allowed[at] += unit_roundoff(x.dtype()) * magnitude[at] * 1.01 + 0x1p-25;
        }
      }
    }
    for (std::uint32_t o = 0; o < before.features(); ++o) {
      wrong += !(std::abs(after.get(token, o) - exact[o]) <= allowed[o]);
    }
  }
  return wrong;
}

inline int num_wrong_of_module(Isa isa, const Adapter& adapter, ModuleIndex module, const Matrix& x,
                               const Matrix& before, const Matrix& after,
                               const Matrix* base_bias = nullptr) {
  const auto bound_of = [isa](const Layout& layout, std::uint32_t row) {
    return rounding_bound(layout, row, isa);
  };
  return num_wrong_by_bound(bound_of, adapter, module, x, before, after, base_bias);
}

}  // namespace pagedlora::testing_support
