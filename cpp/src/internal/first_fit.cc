#include "internal/first_fit.h"

#include <algorithm>

namespace pagedlora::internal {

void FirstFit::grow() {
  const std::size_t leaves = std::max<std::size_t>(num_leaves_ * 2, 8);
  std::vector<std::size_t> tree(leaves * 2, slots_per_page_);
  for (std::size_t i = 0; i < num_leaves_; ++i) {
    tree[leaves + i] = max_free_[num_leaves_ + i];
  }
  for (std::size_t i = leaves - 1; i > 0; --i) {
    tree[i] = std::max(tree[2 * i], tree[2 * i + 1]);
  }
  num_leaves_ = leaves;
  max_free_ = std::move(tree);
}

PartLocation FirstFit::place(std::size_t slots) {
  if (num_leaves_ == 0 || max_free_[1] < slots) {
    grow();
  }
  std::size_t node = 1;
  while (node < num_leaves_) {
    node = max_free_[2 * node] >= slots ? 2 * node : 2 * node + 1;
  }
  const std::size_t page = node - num_leaves_;
  const std::size_t first_slot = slots_per_page_ - max_free_[node];
  max_free_[node] -= slots;
  for (node /= 2; node > 0; node /= 2) {
    max_free_[node] = std::max(max_free_[2 * node], max_free_[2 * node + 1]);
  }
  num_pages_ = std::max(num_pages_, static_cast<std::uint32_t>(page + 1));
  return {static_cast<std::uint32_t>(page), static_cast<std::uint32_t>(first_slot)};
}

}  // namespace pagedlora::internal
