// In which order the evictable entries of one class are given up.
//
// A policy sees only what the calls said, in call order: never the time, never how far a copy
// has come. So managers that get the same calls choose the same victims.
//
// Nodes belong to the caller, who keeps them alive and in at most one policy. Thread-compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "pagedlora/ids.h"

namespace pagedlora {

struct PolicyNode {
  TaskId task;
  std::uint64_t last_use = 0;  // uses are numbered in call order
  PolicyNode* previous = nullptr;
  PolicyNode* next = nullptr;
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Enters a node that becomes evictable: not a use, its last_use may lie long ago.
  virtual void insert(PolicyNode& node) = 0;
  // The inserted node was used again; its last_use has just become the largest of all.
  virtual void touch(PolicyNode& node) = 0;
  virtual void erase(PolicyNode& node) = 0;
  // Who goes next; nullptr when empty. Changes nothing.
  virtual PolicyNode* victim() = 0;
  // Every inserted node once.
  virtual void visit(const std::function<void(const PolicyNode&)>& visitor) const = 0;
};

using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

// "lru": least recently used first. Throws InvalidArgumentError for any other name.
PolicyFactory eviction_policy_factory(std::string_view name);

}  // namespace pagedlora
