#include "lrfu.h"

#include <algorithm>
#include <cmath>

#include "ordered_policy.h"

namespace pagedlora::internal {
namespace {

constexpr double kHalfLifeUses = 256;

struct LowerScoreFirst {
  bool operator()(const PolicyNode* a, const PolicyNode* b) const {
    return a->score != b->score ? a->score < b->score : a->last_use < b->last_use;
  }
};

// A node's worth at a moment is the sum over its uses of 2^((use - moment) / half-life). Ageing
// halves all of them together, so it is left out: the score is the logarithm of the sum of
// 2^(use / half-life), and the order of two nodes changes only when one of them is used.
class LrfuPolicy final : public OrderedPolicy<LowerScoreFirst> {
 public:
  void record_use(PolicyNode& node, std::uint64_t use) override {
    const double added = static_cast<double>(use) / kHalfLifeUses;
    if (node.last_use == 0) {
      node.score = added;
    } else {
      const auto [smaller, larger] = std::minmax(node.score, added);
      node.score = larger + std::log2(1 + std::exp2(smaller - larger));
    }
    node.last_use = use;
  }
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lrfu_policy() { return std::make_unique<LrfuPolicy>(); }

}  // namespace pagedlora::internal
