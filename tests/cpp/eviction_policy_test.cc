// The contract that every eviction policy keeps, and the order that each one promises (C3).
#include "pagedlora/eviction_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "pagedlora/errors.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::num_steps;
using testing_support::seed_label;
using testing_support::seeds;

// As a tier does it: the use first.
void insert(EvictionPolicy& policy, PolicyNode& node) {
  static std::uint64_t uses = 0;
  policy.record_use(node, ++uses);
  policy.insert(node);
}

void touch(EvictionPolicy& policy, PolicyNode& node) {
  policy.erase(node);
  insert(policy, node);
}

class EvictionPolicyContract : public ::testing::TestWithParam<const char*> {
 protected:
  EvictionPolicyContract() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      nodes_[i].task = TaskId{i};
    }
  }

  // The order in which everything would be given up; empties the policy.
  static std::vector<std::uint64_t> drain(EvictionPolicy& policy) {
    std::vector<std::uint64_t> order;
    while (PolicyNode* node = policy.victim()) {
      order.push_back(node->task.value);
      policy.erase(*node);
    }
    return order;
  }

  std::unique_ptr<EvictionPolicy> make() const { return eviction_policy_factory(GetParam())(); }

  std::array<PolicyNode, 8> nodes_;
};

TEST_P(EvictionPolicyContract, AnEmptyPolicyHasNoVictim) {
  const auto policy = make();
  EXPECT_EQ(policy->victim(), nullptr);
  insert(*policy, nodes_[0]);
  policy->erase(nodes_[0]);
  EXPECT_EQ(policy->victim(), nullptr);
}

TEST_P(EvictionPolicyContract, AskingForTheVictimChangesNothing) {
  const auto policy = make();
  insert(*policy, nodes_[0]);
  insert(*policy, nodes_[1]);
  PolicyNode* victim = policy->victim();
  ASSERT_NE(victim, nullptr);
  EXPECT_EQ(policy->victim(), victim);
  EXPECT_EQ(drain(*policy).size(), 2U);
}

TEST_P(EvictionPolicyContract, HoldsExactlyWhatWasInsertedAndNotErased) {
  for (const std::uint32_t seed : seeds(3)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    const auto policy = make();
    std::set<std::uint64_t> held;
    for (int step = 0; step < num_steps(2000); ++step) {
      const std::size_t i = rng() % nodes_.size();
      if (!held.contains(i)) {
        insert(*policy, nodes_[i]);
        held.insert(i);
      } else if (rng() % 2 == 0) {
        touch(*policy, nodes_[i]);
      } else {
        policy->erase(nodes_[i]);
        held.erase(i);
      }
      const PolicyNode* victim = policy->victim();
      ASSERT_EQ(victim == nullptr, held.empty());
      ASSERT_TRUE(victim == nullptr || held.contains(victim->task.value));
    }
    const std::vector<std::uint64_t> order = drain(*policy);
    EXPECT_EQ(std::set(order.begin(), order.end()), held);
    EXPECT_EQ(order.size(), held.size());
  }
}

TEST_P(EvictionPolicyContract, TheSameCallsChooseTheSameVictims_C3) {
  const auto first = make();
  const auto second = make();
  std::array<PolicyNode, 8> others;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    others[i].task = nodes_[i].task;
  }
  std::mt19937 rng(1);
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    insert(*first, nodes_[i]);
    insert(*second, others[i]);
  }
  std::uint64_t uses = 1000;
  for (int step = 0; step < 100; ++step) {
    const std::size_t i = rng() % nodes_.size();
    for (const auto& [policy, node] :
         {std::pair(first.get(), &nodes_[i]), std::pair(second.get(), &others[i])}) {
      policy->erase(*node);
      policy->record_use(*node, uses);
      policy->insert(*node);
    }
    ++uses;
  }
  EXPECT_EQ(drain(*first), drain(*second));
}

TEST_P(EvictionPolicyContract, AnErasedNodeCanJoinAnotherPolicyOfTheKind) {
  const auto first = make();
  const auto second = make();
  insert(*first, nodes_[0]);
  insert(*first, nodes_[1]);
  first->erase(nodes_[0]);
  insert(*second, nodes_[0]);
  EXPECT_EQ(drain(*first), std::vector<std::uint64_t>{1});
  EXPECT_EQ(drain(*second), std::vector<std::uint64_t>{0});
}

INSTANTIATE_TEST_SUITE_P(Policies, EvictionPolicyContract, ::testing::Values("lru", "lrfu"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(LruPolicyTest, TheLeastRecentlyUsedGoesFirst) {
  const auto policy = eviction_policy_factory("lru")();
  std::array<PolicyNode, 4> nodes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].task = TaskId{i};
    insert(*policy, nodes[i]);
  }
  touch(*policy, nodes[0]);
  touch(*policy, nodes[2]);
  policy->erase(nodes[1]);
  insert(*policy, nodes[1]);
  for (const std::uint64_t expected : {3U, 0U, 2U, 1U}) {
    ASSERT_EQ(policy->victim()->task, TaskId{expected});
    policy->erase(*policy->victim());
  }
}

TEST(LruPolicyTest, ANodeThatComesBackTakesThePlaceOfItsLastUse) {
  const auto policy = eviction_policy_factory("lru")();
  std::array<PolicyNode, 4> nodes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].task = TaskId{i};
    insert(*policy, nodes[i]);
  }
  for (const std::size_t i : {2U, 0U, 3U}) {
    policy->erase(nodes[i]);
  }
  for (const std::size_t i : {3U, 0U, 2U}) {
    policy->insert(nodes[i]);
  }
  std::vector<std::uint64_t> order;
  policy->visit([&](const PolicyNode& node) { order.push_back(node.task.value); });
  EXPECT_EQ(order, (std::vector<std::uint64_t>{0, 1, 2, 3}));
}

TEST(LrfuPolicyTest, WhatIsUsedOftenOutlivesWhatWasUsedLast) {
  const auto policy = eviction_policy_factory("lrfu")();
  std::array<PolicyNode, 3> nodes;
  std::uint64_t uses = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].task = TaskId{i};
  }
  for (int repeat = 0; repeat < 5; ++repeat) {
    policy->record_use(nodes[0], ++uses);
  }
  policy->record_use(nodes[1], ++uses);
  policy->record_use(nodes[2], ++uses);
  for (PolicyNode& node : nodes) {
    policy->insert(node);
  }
  std::vector<std::uint64_t> order;
  policy->visit([&](const PolicyNode& node) { order.push_back(node.task.value); });
  EXPECT_EQ(order, (std::vector<std::uint64_t>{1, 2, 0}));
}

TEST(LrfuPolicyTest, OldUsesAreForgotten) {
  const auto policy = eviction_policy_factory("lrfu")();
  PolicyNode old;
  PolicyNode recent;
  for (std::uint64_t use = 1; use <= 8; ++use) {
    policy->record_use(old, use);
  }
  policy->record_use(recent, 8 + 256 * 2);  // eight uses are worth two by now
  policy->insert(old);
  policy->insert(recent);
  EXPECT_EQ(policy->victim(), &recent);
  policy->erase(old);
  policy->erase(recent);
  policy->record_use(recent, 9 + 256 * 2);
  policy->record_use(recent, 10 + 256 * 2);
  policy->insert(old);
  policy->insert(recent);
  EXPECT_EQ(policy->victim(), &old);
}

TEST(EvictionPolicyFactoryTest, RefusesNamesItDoesNotKnow) {
  EXPECT_THROW(eviction_policy_factory("mru"), InvalidArgumentError);
  EXPECT_THROW(eviction_policy_factory(""), InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
