#include <memory>
#include <string>

#include "pagedlora/errors.h"
#include "pagedlora/eviction_policy.h"

namespace pagedlora {
namespace {

// A ring through a sentinel: sentinel.next is the least recently used.
class LruPolicy final : public EvictionPolicy {
 public:
  LruPolicy() { ring_.previous = ring_.next = &ring_; }
  LruPolicy(const LruPolicy&) = delete;
  LruPolicy& operator=(const LruPolicy&) = delete;

  void insert(PolicyNode& node) override {
    node.previous = ring_.previous;
    node.next = &ring_;
    ring_.previous->next = &node;
    ring_.previous = &node;
  }

  void touch(PolicyNode& node) override {
    erase(node);
    insert(node);
  }

  void erase(PolicyNode& node) override {
    node.previous->next = node.next;
    node.next->previous = node.previous;
    node.previous = node.next = nullptr;
  }

  PolicyNode* victim() override { return ring_.next == &ring_ ? nullptr : ring_.next; }

 private:
  PolicyNode ring_;
};

}  // namespace

PolicyFactory eviction_policy_factory(std::string_view name) {
  if (name == "lru") {
    return [] { return std::make_unique<LruPolicy>(); };
  }
  throw InvalidArgumentError("eviction_policy is \"" + std::string(name) + "\"; \"lru\" is known");
}

}  // namespace pagedlora
