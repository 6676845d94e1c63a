// Shares one Layout among adapters of one shape, and forgets shapes that are not in use.
//
// Thread-compatible: the caller holds the manager's lock.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "pagedlora/layout.h"

namespace pagedlora {

class LayoutCache {
 public:
  LayoutCache(std::shared_ptr<const LoraModelConfig> config, const LayoutParams& params,
              std::size_t max_layouts = 64)
      : config_(std::move(config)), params_(params), max_layouts_(max_layouts) {}

  std::shared_ptr<const Layout> get(const std::vector<RowShape>& rows);

 private:
  struct RowsHash {
    std::size_t operator()(const std::vector<RowShape>& rows) const noexcept;
  };
  using Recency = std::list<std::vector<RowShape>>;
  struct Slot {
    std::shared_ptr<const Layout> layout;
    Recency::iterator recency;
  };

  std::shared_ptr<const LoraModelConfig> config_;
  LayoutParams params_;
  std::size_t max_layouts_;
  Recency recency_;  // least recently used first
  std::unordered_map<std::vector<RowShape>, Slot, RowsHash> slots_;
};

}  // namespace pagedlora
