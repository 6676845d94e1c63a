// A policy that is nothing but an order of nodes.
//
// Thread-compatible.
#pragma once

#include <functional>
#include <set>
#include <utility>

#include "pagedlora/eviction_policy.h"

namespace pagedlora::internal {

// Less: whether a node goes before another one. A total order; what it looks at does not change
// while a node is inserted.
template <class Less>
class OrderedPolicy : public EvictionPolicy {
 public:
  void insert(PolicyNode& node) noexcept override {
    node.tree_node.value() = &node;
    nodes_.insert(std::move(node.tree_node));
  }
  void erase(PolicyNode& node) noexcept override { node.tree_node = nodes_.extract(&node); }
  PolicyNode* victim() override { return nodes_.empty() ? nullptr : *nodes_.begin(); }
  void visit(const std::function<void(const PolicyNode&)>& visitor) const override {
    for (const PolicyNode* node : nodes_) {
      visitor(*node);
    }
  }

 private:
  std::set<PolicyNode*, Less> nodes_;
};

// For tasks that wait for their turn: whose turn is farthest goes first.
struct FartherFirst {
  bool operator()(const PolicyNode* a, const PolicyNode* b) const {
    return a->distance != b->distance ? a->distance > b->distance : a->task < b->task;
  }
};
using FarthestFirstPolicy = OrderedPolicy<FartherFirst>;

}  // namespace pagedlora::internal
