// A manager and adapters of 4 MiB, each of which its worker and one helper read.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "dying_source.h"
#include "internal/load_jobs.h"
#include "numbered_readers.h"
#include "peft_async_fixture.h"

namespace pagedlora::testing_support {

class LargeAdapterTest : public ::testing::Test {
 protected:
  struct LargeAdapter {
    TestAdapter content;  // with the plan that the manager gets
    std::shared_ptr<NumberedReaders> readers;
  };

  LargeAdapterTest() {
    options_.load_timeout = std::chrono::hours(1);
    options_.num_put_workers = 2;
  }
  void SetUp() override {
    if (internal::num_load_helpers(options_.num_put_workers) == 0) {
      GTEST_SKIP() << "one core: nobody to help";
    }
    make_manager();
  }
  void TearDown() override {
    for (const auto& readers : all_readers_) {
      readers->open_gates();
    }
    if (manager_ != nullptr) {
      manager_->check_invariants();
    }
  }

  // With room for three of them in each tier.
  void make_manager() {
    options_.host_cache_bytes = options_.device_cache_bytes = 13U << 20;
    manager_ = std::make_unique<PeftCacheManager>(config_, options_, make_host_device(),
                                                  eviction_policy_factory("lru"));
  }
  // Its source does something when it is destroyed.
  LargeAdapter make_large(std::function<void()> last_act = [] {}) {
    LargeAdapter adapter{make_adapter(*config_, {kRank}, ++next_value_), nullptr};
    adapter.readers = std::make_shared<NumberedReaders>(adapter.content.source);
    const auto source = std::make_shared<DyingSource>(adapter.readers, std::move(last_act));
    adapter.content.plan =
        std::make_shared<const AdapterPlan>(*config_, adapter.content.plan->rows(), source);
    all_readers_.push_back(adapter.readers);
    return adapter;
  }

  void add(std::uint64_t request, TaskId task) {
    manager_->add_request_peft(RequestId{request}, task);
  }
  // The first load of an adapter and of a manager, when nobody has read anything: its worker and the
  // helper stand before their first reads.
  void add_blocked(std::uint64_t request, TaskId task, const LargeAdapter& adapter) {
    close_gates(adapter);
    add(request, task);
    wait_for_readers(adapter);
  }
  void close_gates(const LargeAdapter& adapter) {
    adapter.readers->gates[0].close();
    adapter.readers->gates[1].close();
  }
  void wait_for_readers(const LargeAdapter& adapter) {
    for (const std::size_t reader : {0U, 1U}) {
      ASSERT_TRUE(comes_true([&] { return adapter.readers->gates[reader].num_begun() > 0; }));
    }
  }
  // Loads and calls `check` with the number of the request, again and again, until both have read a
  // part of one: the helper may still be leaving the load before.
  void load_until_both_read(const LargeAdapter& adapter, TaskId task,
                            const std::function<void(std::uint64_t)>& check) {
    EXPECT_TRUE(comes_true([&] {
      const std::size_t before = adapter.readers->num_that_read();
      const std::uint64_t request = ++next_request_;
      add(request, task);
      EXPECT_TRUE(manager_->wait_idle(std::chrono::seconds(60)));
      const std::size_t num_readers = adapter.readers->num_that_read() - before;
      check(request);
      give_up(request);
      return num_readers == 2 || ::testing::Test::HasFailure();
    }));
  }
  void give_up(std::uint64_t request) {
    manager_->mark_request_done(RequestId{request});
    for (const Tier tier : {Tier::host, Tier::device}) {
      manager_->evict_unowned(tier);
      EXPECT_EQ(manager_->free_pages(tier), manager_->max_pages(tier));
    }
  }
  AdapterState state_of(std::uint64_t request) const {
    return manager_->adapter_state(RequestId{request});
  }
  bool content_is_right(TaskId task, Tier tier, const LargeAdapter& adapter) {
    bool right = false;
    manager_->read_task(task, tier, [&](const TaskPages& pages, const AdapterPlan& /*plan*/) {
      right = holds_adapter(pages, *config_, adapter.content);
    });
    return right;
  }

  static constexpr std::uint32_t kRank = 64;
  static constexpr int kNumChunks = 16;  // that each of two readers takes half of
  static constexpr std::size_t kAdapterBytes = 4U << 20;
  PeftCacheOptions options_;
  const std::shared_ptr<const LoraModelConfig> config_ = float32_model({{8192, 8192}});
  std::unique_ptr<PeftCacheManager> manager_;
  std::vector<std::shared_ptr<NumberedReaders>> all_readers_;
  int next_value_ = 0;
  std::uint64_t next_request_ = 0;
};

}  // namespace pagedlora::testing_support
