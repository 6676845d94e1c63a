// Finds the page size that wastes least, for a model whose adapters are not known yet.
//
// The candidates are judged on the fleets that users have: ranks {8..128}, {4..64}, all 8 and all
// 64, each on {q,v}, {q,k,v,o} and all modules. The judgement is the real layout, so what it
// promises is what the tiers get.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"

namespace pagedlora {

// A set of adapters that would be resident together.
using Fleet = std::vector<std::vector<RowShape>>;

// Bytes of weights per byte of pages in use.
double utilisation(const LoraModelConfig& config, const Fleet& fleet, const LayoutParams& params);

// The fleets above, as far as the model has such modules.
std::vector<Fleet> standard_fleets(const LoraModelConfig& config);

// Page and part sizes for a tier of `budget_bytes`. Candidates are multiples of what the model's
// parts have in common, largest first, each with parts of the whole page down to a 16th of it; the
// first whose worst fleet wastes less than a five-hundredth wins, else the one that wastes least.
// Never over budget_bytes / 4, so that even a small tier has a few pages.
LayoutParams search_layout_params(const LoraModelConfig& config, std::size_t budget_bytes);

}  // namespace pagedlora
