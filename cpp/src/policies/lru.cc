#include <memory>
#include <string>

#include "lrfu.h"
#include "pagedlora/errors.h"
#include "pagedlora/eviction_policy.h"

namespace pagedlora {
namespace {

// A ring through a sentinel, in order of last use: sentinel.next is the least recently used.
class LruPolicy final : public EvictionPolicy {
 public:
  LruPolicy() { ring_.previous = ring_.next = &ring_; }
  LruPolicy(const LruPolicy&) = delete;
  LruPolicy& operator=(const LruPolicy&) = delete;

  // Looks for the place from the recent end: only what was used since then is passed by.
  void insert(PolicyNode& node) noexcept override {
    PolicyNode* before = ring_.previous;
    while (before != &ring_ && before->last_use > node.last_use) {
      before = before->previous;
    }
    node.previous = before;
    node.next = before->next;
    before->next->previous = &node;
    before->next = &node;
  }

  void erase(PolicyNode& node) noexcept override {
    node.previous->next = node.next;
    node.next->previous = node.previous;
    node.previous = node.next = nullptr;
  }

  PolicyNode* victim() override { return ring_.next == &ring_ ? nullptr : ring_.next; }

  void visit(const std::function<void(const PolicyNode&)>& visitor) const override {
    for (const PolicyNode* node = ring_.next; node != &ring_; node = node->next) {
      visitor(*node);
    }
  }

 private:
  PolicyNode ring_;
};

}  // namespace

PolicyFactory eviction_policy_factory(std::string_view name) {
  if (name == "lru") {
    return [] { return std::make_unique<LruPolicy>(); };
  }
  if (name == "lrfu") {
    return &internal::make_lrfu_policy;
  }
  throw InvalidArgumentError("eviction_policy is \"" + std::string(name) +
                             "\"; \"lru\" and \"lrfu\" are known");
}

}  // namespace pagedlora
