#include "pagedlora/page_size_search.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

constexpr std::size_t kMaxPageBytes = 256U << 10;
constexpr std::size_t kMinPageBytes = 4096;
constexpr std::size_t kMaxCandidates = 128;
constexpr std::array<std::size_t, 4> kPartsPerPage{1, 4, 8, 16};
// Parts of one adapter beyond which a layout takes too long to judge, and to load.
constexpr std::size_t kMaxParts = std::size_t{1} << 18;
constexpr double kGoodEnough = 0.998;

using RankList = std::vector<std::uint32_t>;

std::string_view last_component(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// The modules whose names end in one of `targets`; all modules if `targets` is empty.
std::vector<ModuleIndex> select(const LoraModelConfig& config,
                                const std::vector<std::string_view>& targets) {
  std::vector<ModuleIndex> selected;
  for (std::uint32_t i = 0; i < config.modules().size(); ++i) {
    const std::string_view name = last_component(config.modules()[i].name);
    if (targets.empty() || std::ranges::find(targets, name) != targets.end()) {
      selected.push_back(ModuleIndex{i});
    }
  }
  return selected;
}

std::vector<RowShape> rows_of(const std::vector<ModuleIndex>& modules, std::uint32_t rank) {
  std::vector<RowShape> rows;
  rows.reserve(modules.size());
  for (const ModuleIndex module : modules) {
    rows.push_back({module, rank, {}, {}});
  }
  return rows;
}

// The worst of the fleets, or any value below `floor` as soon as it is certain to be below.
double worst_utilisation(const LoraModelConfig& config, const std::vector<Fleet>& fleets,
                         const LayoutParams& params, double floor) {
  double worst = 1.0;
  for (const Fleet& fleet : fleets) {
    worst = std::min(worst, utilisation(config, fleet, params));
    if (worst < floor) {
      break;
    }
  }
  return worst;
}

// What all parts of full blocks have in common, so that they fill pages without gaps.
std::size_t common_part_bytes(const LoraModelConfig& config) {
  const std::size_t feature_bytes = kMaxBlockRanks * element_bytes(config.dtype());
  std::size_t common = 0;
  for (const LoraModule& module : config.modules()) {
    common = std::gcd(common, static_cast<std::size_t>(module.in_features) * feature_bytes);
    common = std::gcd(common, static_cast<std::size_t>(module.out_features) * feature_bytes);
  }
  return common;
}

// Distance of the candidates: a multiple of a slot and, where it has one of use, of the common
// size.
std::size_t candidate_step(const LoraModelConfig& config, std::size_t largest) {
  const std::size_t unit = std::lcm(common_part_bytes(config), kSlotBytes);
  const std::size_t base = unit != 0 && unit <= largest ? unit : kSlotBytes;
  const std::size_t multiple = (largest / kMaxCandidates + base - 1) / base;
  return base * std::max<std::size_t>(multiple, 1);
}

// Bytes of the largest adapter of the fleets.
std::size_t largest_adapter_bytes(const LoraModelConfig& config, const std::vector<Fleet>& fleets) {
  std::size_t largest = 0;
  for (const Fleet& fleet : fleets) {
    for (const std::vector<RowShape>& rows : fleet) {
      std::size_t elements = 0;
      for (const RowShape& row : rows) {
        const LoraModule& module = config.module(row.module);
        elements += row.rank * static_cast<std::size_t>(module.in_features + module.out_features);
      }
      largest = std::max(largest, elements * element_bytes(config.dtype()));
    }
  }
  return largest;
}

}  // namespace

double utilisation(const LoraModelConfig& config, const Fleet& fleet, const LayoutParams& params) {
  std::size_t payload_bytes = 0;
  std::size_t page_bytes = 0;
  for (const std::vector<RowShape>& rows : fleet) {
    const Layout layout(config, rows, params);
    payload_bytes += layout.payload_bytes();
    page_bytes += layout.num_pages() * params.page_bytes;
  }
  return static_cast<double>(payload_bytes) / static_cast<double>(page_bytes);
}

std::vector<Fleet> standard_fleets(const LoraModelConfig& config) {
  const std::vector<RankList> rank_lists{{8}, {64}, {4, 8, 16, 32, 64}, {8, 16, 32, 64, 128}};
  const std::vector<std::vector<std::string_view>> target_lists{
      {"q_proj", "v_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj"}, {}};
  std::vector<Fleet> fleets;
  for (const RankList& ranks : rank_lists) {
    for (const std::vector<std::string_view>& targets : target_lists) {
      const std::vector<ModuleIndex> modules = select(config, targets);
      if (modules.empty()) {
        continue;
      }
      Fleet fleet;
      for (const std::uint32_t rank : ranks) {
        fleet.push_back(rows_of(modules, rank));
      }
      fleets.push_back(std::move(fleet));
    }
  }
  return fleets;
}

LayoutParams search_layout_params(const LoraModelConfig& config, std::size_t budget_bytes) {
  const std::size_t largest = std::min(kMaxPageBytes, budget_bytes / 4);
  const std::size_t least = kMaxBlockRanks * element_bytes(config.dtype());
  if (largest < std::max(least, kSlotBytes)) {
    throw InvalidArgumentError("a tier of " + std::to_string(budget_bytes) +
                               (budget_bytes == 1 ? " byte" : " bytes") +
                               " is too small for pages; give each at least " +
                               std::to_string(4 * std::max(least, kSlotBytes)) + " bytes");
  }
  const std::vector<Fleet> fleets = standard_fleets(config);
  const std::size_t step = candidate_step(config, largest);
  LayoutParams best{largest / kSlotBytes * kSlotBytes, element_bytes(config.dtype()), 0};
  const std::size_t most_bytes = largest_adapter_bytes(config, fleets);
  double best_utilisation = 0.0;
  for (std::size_t page = largest / step * step;
       page >= std::min(kMinPageBytes, largest) && page > 0; page -= step) {
    for (const std::size_t parts : kPartsPerPage) {
      const LayoutParams params{page, best.element_bytes, page / parts / kSlotBytes * kSlotBytes};
      if (params.max_part_bytes < std::max(least, kSlotBytes) ||
          most_bytes / params.max_part_bytes > kMaxParts) {
        continue;
      }
      const double worst = worst_utilisation(config, fleets, params, best_utilisation);
      if (worst > best_utilisation) {
        best = params;
        best_utilisation = worst;
      }
      if (worst >= kGoodEnough) {
        return best;
      }
    }
  }
  return best;
}

}  // namespace pagedlora
