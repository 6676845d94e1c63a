#include "pagedlora/layout_cache.h"

namespace pagedlora {

std::size_t LayoutCache::RowsHash::operator()(const std::vector<RowShape>& rows) const noexcept {
  std::uint64_t hash = 0xCBF29CE484222325U;  // FNV-1a
  for (const RowShape& row : rows) {
    for (const std::uint32_t word :
         {row.module.value, row.rank, row.in.offset, row.in.length, row.out.offset, row.out.length,
          std::uint32_t{row.has_bias}, std::uint32_t{row.has_dora_scale}}) {
      hash = (hash ^ word) * 0x100000001B3U;
    }
  }
  return hash;
}

std::shared_ptr<const Layout> LayoutCache::get(const std::vector<RowShape>& rows) {
  const auto found = slots_.find(rows);
  if (found != slots_.end()) {
    recency_.splice(recency_.end(), recency_, found->second.recency);
    return found->second.layout;
  }
  auto layout = std::make_shared<const Layout>(*config_, rows, params_);
  if (slots_.size() >= max_layouts_) {
    slots_.erase(recency_.front());
    recency_.pop_front();
  }
  const auto recency = recency_.insert(recency_.end(), rows);
  try {
    slots_.emplace(rows, Slot{layout, recency});
  } catch (...) {  // out of memory
    recency_.erase(recency);
    throw;
  }
  return layout;
}

}  // namespace pagedlora
