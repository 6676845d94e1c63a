// In which order the evictable entries of one class are given up.
//
// A policy sees only what the calls said, in call order: never the time, never how far a copy
// has come. So managers that get the same calls choose the same victims.
//
// Nodes belong to the caller, who keeps them alive and in at most one policy. Thread-compatible.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "pagedlora/ids.h"

namespace pagedlora {

struct PolicyNode {
  TaskId task;
  PolicyNode* previous = nullptr;
  PolicyNode* next = nullptr;
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual void insert(PolicyNode& node) = 0;  // counts as a use
  virtual void touch(PolicyNode& node) = 0;   // another use of an inserted node
  virtual void erase(PolicyNode& node) = 0;
  virtual PolicyNode* victim() = 0;  // who goes next; nullptr when empty. Changes nothing
};

using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

// "lru": least recently used first. Throws InvalidArgumentError for any other name.
PolicyFactory eviction_policy_factory(std::string_view name);

}  // namespace pagedlora
