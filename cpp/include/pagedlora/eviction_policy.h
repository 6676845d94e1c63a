// In which order the evictable entries of one class are given up.
//
// A policy sees only what the calls said, in call order: never the time, never how far a copy
// has come. So managers that get the same calls choose the same victims.
//
// Nodes belong to the caller, who keeps them alive and in at most one policy. Whatever a policy
// stores about a node is in the node: inserting and erasing need no memory and cannot fail.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string_view>

#include "pagedlora/ids.h"

namespace pagedlora {

struct PolicyNode {
  std::uint64_t last_use = 0;  // uses are numbered in call order
  std::uint64_t distance = 0;  // of a task that waits: how far away its turn is
  // Its place, in a policy that is a ring.
  PolicyNode* previous = nullptr;
  PolicyNode* next = nullptr;
  TaskId task;
  double score = 0;  // a policy's own
  // Its place, in a policy that is a tree, while it is not in one.
  std::set<PolicyNode*>::node_type tree_node = make_tree_node();

 private:
  static std::set<PolicyNode*>::node_type make_tree_node() {
    std::set<PolicyNode*> tree{nullptr};
    return tree.extract(tree.begin());
  }
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The node, which is not inserted, is used; the number is the largest so far.
  virtual void record_use(PolicyNode& node, std::uint64_t use) { node.last_use = use; }
  // Enters a node that becomes evictable: not a use, its last one may lie long ago.
  virtual void insert(PolicyNode& node) noexcept = 0;
  virtual void erase(PolicyNode& node) noexcept = 0;
  // Who goes next; nullptr when empty. Changes nothing.
  virtual PolicyNode* victim() = 0;
  // Every inserted node once; the first ones go first.
  virtual void visit(const std::function<void(const PolicyNode&)>& visitor) const = 0;
};

using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

// "lru": least recently used first.
// "lrfu": fewest recent uses first. Each use counts half of what it did 256 uses of the tier ago,
//         so that one-time visitors do not displace what many requests come back to.
// Throws InvalidArgumentError for any other name.
PolicyFactory eviction_policy_factory(std::string_view name);

}  // namespace pagedlora
