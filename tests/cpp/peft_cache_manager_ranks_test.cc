// Two ranks of a tensor-parallel group: the same calls, loads that end at other times and fail on one
// side only. They must give up the same copies in the same order (design 3.3: C3).
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::FakeDevice;
using testing_support::float32_model;
using testing_support::holds_adapter;
using testing_support::make_adapter;
using testing_support::num_steps;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::TestAdapter;

using Evictions = std::vector<std::pair<Tier, TaskId>>;

struct Rank {
  Rank(const std::shared_ptr<const LoraModelConfig>& config, std::string_view policy)
      : manager(config, options(), device, eviction_policy_factory(policy)) {}
  ~Rank() { open_all_gates(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  PeftCacheOptions options() {
    PeftCacheOptions options;
    options.host_cache_bytes = 12 * 512;
    options.device_cache_bytes = 8 * 512;
    options.page_bytes = 512;
    options.on_evict = [this](Tier tier, TaskId task) { evictions.emplace_back(tier, task); };
    return options;
  }
  void open_all_gates() {
    for (const auto& [task, adapter] : adapters) {
      adapter.source->gate.open();
    }
    device->copies.open();
  }
  std::vector<LoadOutcome> ended() {
    std::vector<LoadOutcome> seen;
    manager.poll({}, [&](const std::vector<LoadOutcome>& outcomes) {
      seen = outcomes;
      return std::vector<LoadOutcome>{};
    });
    return seen;
  }

  std::shared_ptr<FakeDevice> device = std::make_shared<FakeDevice>();
  std::map<TaskId, TestAdapter> adapters;
  Evictions evictions;
  std::shared_ptr<BatchLease> lease;
  PeftCacheManager manager;
};

class TwoRanks {
 public:
  TwoRanks(std::uint32_t seed, std::string_view policy)
      : rng_(seed), first_(config_, policy), second_(config_, policy) {
    for (int i = 0; i < 9; ++i) {
      const std::uint32_t rank = 1 + pick(24);
      for (Rank* each : {&first_, &second_}) {  // a source of its own each
        const TestAdapter adapter = make_adapter(*config_, {rank}, i);
        const TaskId task = each->manager.register_task(adapter.plan);
        each->adapters[task] = adapter;
      }
    }
    for (const auto& [task, adapter] : first_.adapters) {
      tasks_.push_back(task);
    }
  }

  void step() {
    delay(first_);
    delay(second_);
    const RequestId request{pick(8)};
    const std::uint32_t action = pick(20);
    if (action < 6) {
      const TaskId task = tasks_[pick(tasks_.size())];
      same(
          [&](Rank& rank) { rank.manager.add_request_peft(request, task, nullptr, pick_same(4)); });
    } else if (action < 10) {
      const bool pause = pick(3) == 0;
      same([&](Rank& rank) { rank.manager.mark_request_done(request, pause); });
    } else if (action < 15) {
      poll();
    } else if (action < 18) {
      ensure();
    } else {
      const std::vector<TaskId> window{tasks_[pick(tasks_.size())], tasks_[pick(tasks_.size())],
                                       tasks_[pick(tasks_.size())]};
      same([&](Rank& rank) { rank.manager.prefetch(window); });
    }
    ASSERT_EQ(first_.evictions, second_.evictions);
  }

  std::size_t num_evictions() const { return first_.evictions.size(); }

 private:
  std::uint32_t pick(std::size_t choices) { return static_cast<std::uint32_t>(rng_() % choices); }
  // The same for both ranks within a step.
  bool pick_same(std::uint32_t choices) const { return num_steps_ % choices == 0; }

  // Another timing for each rank.
  void delay(Rank& rank) {
    ++num_steps_;
    const FakeSourceOf source(rank, tasks_[pick(tasks_.size())]);
    switch (pick(12)) {
      case 0:
        source->gate.close();
        break;
      case 1:
        rank.device->copies.close();
        break;
      case 2:
        rank.open_all_gates();
        break;
      case 3:
        source->fail_read_after = 0;
        break;
      default:
        break;
    }
  }
  struct FakeSourceOf {
    FakeSourceOf(const Rank& rank, TaskId task) : source(rank.adapters.at(task).source) {}
    const testing_support::FakeSource* operator->() const { return source.get(); }
    std::shared_ptr<const testing_support::FakeSource> source;
  };

  // The call must do the same on both ranks, or be refused by both.
  template <class Call>
  void same(Call call) {
    const auto is_refused = [&](Rank& rank) {
      try {
        call(rank);
        return false;
      } catch (const Error&) {
        return true;
      }
    };
    ASSERT_EQ(is_refused(first_), is_refused(second_));
  }

  void poll() {
    std::vector<LoadOutcome> agreed;
    const std::vector<LoadOutcome> elsewhere = second_.ended();
    for (LoadOutcome outcome : first_.ended()) {
      const auto other = std::ranges::find_if(elsewhere, [&](const LoadOutcome& candidate) {
        return candidate.task == outcome.task && candidate.tier == outcome.tier;
      });
      if (other != elsewhere.end()) {
        outcome.loaded = outcome.loaded && other->loaded;
        agreed.push_back(outcome);
      }
    }
    std::ranges::sort(agreed, {}, [](const LoadOutcome& outcome) {
      return std::pair(outcome.tier, outcome.task);
    });
    const auto agree = [&](const std::vector<LoadOutcome>&) { return agreed; };
    ASSERT_EQ(first_.manager.poll({}, agree), second_.manager.poll({}, agree));
  }

  // As an engine does: only requests that are ready.
  void ensure() {
    std::vector<RequestId> batch;
    for (std::uint64_t request = 0; request < 8; ++request) {
      const AdapterState state = first_.manager.adapter_state(RequestId{request});
      ASSERT_EQ(state, second_.manager.adapter_state(RequestId{request}));
      if (state == AdapterState::ready && pick(3) == 0) {
        batch.push_back(RequestId{request});
      }
    }
    first_.open_all_gates();  // copies that are under way must end
    second_.open_all_gates();
    same([&](Rank& rank) { rank.lease = rank.manager.ensure_batch(batch); });
    for (Rank* rank : {&first_, &second_}) {
      if (rank->lease != nullptr && rank->lease->is_open()) {
        for (const BatchLease::LeasedTask& leased : rank->lease->tasks()) {
          ASSERT_TRUE(holds_adapter(leased.pages, *config_, rank->adapters.at(leased.task)));
        }
      }
    }
  }

  std::mt19937 rng_;
  const std::shared_ptr<const LoraModelConfig> config_ = float32_model({{8, 8}});
  Rank first_;
  Rank second_;
  std::vector<TaskId> tasks_;
  std::uint32_t num_steps_ = 0;
};

class RanksTest : public ::testing::TestWithParam<const char*> {};

TEST_P(RanksTest, C3_TheSameCallsGiveUpTheSameCopiesWhateverTheTiming) {
  for (const std::uint32_t seed : seeds(8)) {
    SCOPED_TRACE(seed_label(seed));
    TwoRanks ranks(seed, GetParam());
    for (int i = 0; i < num_steps(8'000); ++i) {
      ranks.step();
      if (::testing::Test::HasFatalFailure()) {
        FAIL() << "at step " << i;
      }
    }
    EXPECT_GT(ranks.num_evictions(), 20U);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RanksTest, ::testing::Values("lru", "lrfu"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace pagedlora
