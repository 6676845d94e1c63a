// Adapters in fake sources, and a manager over small tiers, for the tests of PeftCacheManager.
//
// Weights are float32 and differ in every element, so that a part in a wrong place is noticed.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "fake_source.h"
#include "pagedlora/peft_cache_manager.h"
#include "pagedlora/task_entries.h"

namespace pagedlora::testing_support {

struct TestAdapter {
  std::shared_ptr<FakeSource> source;
  std::shared_ptr<const AdapterPlan> plan;
};

inline std::shared_ptr<const LoraModelConfig> float32_model(
    std::initializer_list<std::pair<std::int64_t, std::int64_t>> in_out) {
  std::vector<LoraModule> modules;
  for (const auto& [in, out] : in_out) {
    modules.push_back({"module." + std::to_string(modules.size()), -1, -1, in, out});
  }
  return std::make_shared<const LoraModelConfig>(std::move(modules), Dtype::float32,
                                                 LoraModelConfig::kMaxRank);
}

// One row per rank that is not 0, in module order. `value` tells adapters apart; holes over 4 KiB
// make every matrix a read of its own.
inline TestAdapter make_adapter(const LoraModelConfig& config,
                                const std::vector<std::uint32_t>& ranks, int value,
                                std::size_t hole_bytes = 0) {
  std::vector<std::byte> bytes;
  int next = 0;
  const auto append = [&](std::size_t elements) {
    const PlannedMatrix matrix{bytes.size(), Dtype::float32};
    for (std::size_t i = 0; i < elements; ++i) {
      const float weight = static_cast<float>(value) + static_cast<float>(next++) * 0x1p-12F;
      const auto* raw = reinterpret_cast<const std::byte*>(&weight);
      bytes.insert(bytes.end(), raw, raw + sizeof(weight));
    }
    bytes.resize(bytes.size() + hole_bytes, std::byte{0xFF});
    return matrix;
  };
  std::vector<PlannedRow> rows;
  for (std::uint32_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != 0) {
      const LoraModule& module = config.module(ModuleIndex{i});
      const PlannedMatrix a = append(ranks[i] * static_cast<std::size_t>(module.in_features));
      const PlannedMatrix b = append(ranks[i] * static_cast<std::size_t>(module.out_features));
      rows.push_back({ModuleIndex{i}, ranks[i], a, b, static_cast<float>(value) + 0.5F});
    }
  }
  auto source = std::make_shared<FakeSource>(std::move(bytes));
  return {source, std::make_shared<const AdapterPlan>(config, std::move(rows), source)};
}

// Whether the pages hold this adapter: its shape, its scales and each of its bytes.
inline bool holds_adapter(const TaskPages& pages, const LoraModelConfig& config,
                          const TestAdapter& adapter) {
  if (pages.layout->rows() != adapter.plan->row_shapes()) {
    return false;
  }
  std::vector<std::byte> a;
  std::vector<std::byte> b;
  for (std::uint32_t row = 0; row < adapter.plan->rows().size(); ++row) {
    const PlannedRow& planned = adapter.plan->rows()[row];
    const LoraModule& module = config.module(planned.module);
    a.resize(planned.rank * static_cast<std::size_t>(module.in_features) * sizeof(float));
    b.resize(planned.rank * static_cast<std::size_t>(module.out_features) * sizeof(float));
    gather_row(pages, row, a.data(), b.data());
    const std::byte* source = adapter.source->bytes.data();
    if (std::memcmp(a.data(), source + planned.a.offset, a.size()) != 0 ||
        std::memcmp(b.data(), source + planned.b.offset, b.size()) != 0 ||
        pages.scales[row] != planned.scale) {
      return false;
    }
  }
  return true;
}

// One module of 8 x 8 in pages of 512 bytes: an adapter of rank 8 n takes exactly n pages.
class PeftTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (manager_ != nullptr) {
      manager_->check_invariants();
    }
  }

  void make_manager(std::size_t host_pages, std::size_t device_pages) {
    make_manager_over(device_, host_pages, device_pages);
  }
  void make_manager_over(std::shared_ptr<Device> device, std::size_t host_pages,
                         std::size_t device_pages) {
    options_.host_cache_bytes = host_pages * kPageBytes;
    options_.device_cache_bytes = device_pages * kPageBytes;
    options_.page_bytes = kPageBytes;
    manager_ = std::make_unique<PeftCacheManager>(config_, options_, std::move(device),
                                                  eviction_policy_factory("lru"));
  }

  TestAdapter adapter_of(std::uint32_t pages, std::size_t hole_bytes = 0) {
    return make_adapter(*config_, {pages * kMaxBlockRanks}, ++next_value_, hole_bytes);
  }
  TaskId register_adapter(std::uint32_t pages, std::size_t hole_bytes = 0) {
    const TestAdapter adapter = adapter_of(pages, hole_bytes);
    const TaskId task = manager_->register_task(adapter.plan);
    adapters_[task] = adapter;
    return task;
  }

  // Adds and waits for the load; throws what it failed with, the request being done then.
  void add(std::uint64_t request, TaskId task) {
    start_to_add(request, task);
    settle(request);
  }
  void add(std::uint64_t request, std::uint64_t task, const TestAdapter& adapter,
           const std::string& digest) {
    const CarriedWeights weights{adapter.plan, digest};
    manager_->add_request_peft(RequestId{request}, TaskId{task}, &weights);
    adapters_[TaskId{task}] = adapter;
    settle(request);
  }
  void start_to_add(std::uint64_t request, TaskId task, bool started = false) {
    manager_->add_request_peft(RequestId{request}, task, nullptr, started);
  }
  void settle(std::uint64_t request) {
    EXPECT_TRUE(manager_->wait_idle(kPatience)) << "loads take for ever";
    if (const std::exception_ptr error = manager_->adapter_error(RequestId{request})) {
      done(request);
      std::rethrow_exception(error);
    }
  }
  void pause(std::uint64_t request) { manager_->mark_request_done(RequestId{request}, true); }
  void done(std::uint64_t request) { manager_->mark_request_done(RequestId{request}); }

  std::shared_ptr<BatchLease> ensure(std::initializer_list<std::uint64_t> requests,
                                     bool reset = false, void* stream = nullptr) {
    std::vector<RequestId> ids;
    for (const std::uint64_t request : requests) {
      ids.push_back(RequestId{request});
    }
    return manager_->ensure_batch(ids, reset, stream);
  }
  void ensure_and_close(std::initializer_list<std::uint64_t> requests) {
    ensure(requests)->close();
  }

  bool on_host(TaskId task) const { return manager_->is_task_cached(task, Tier::host); }
  bool on_device(TaskId task) const { return manager_->is_task_cached(task, Tier::device); }

  // Whether the tier's copy of the task is byte for byte what its source holds.
  bool content_is_right(TaskId task, Tier tier) {
    bool right = false;
    manager_->read_task(task, tier, [&](const TaskPages& pages, const AdapterPlan& /*plan*/) {
      right = holds_adapter(pages, *config_, adapters_.at(task));
    });
    return right;
  }
  bool content_is_right(const BatchLease& lease, std::uint64_t request) {
    const BatchLease::LeasedTask* leased = lease.find(RequestId{request});
    return leased != nullptr && holds_adapter(leased->pages, *config_, adapters_.at(leased->task));
  }
  const FakeSource& source_of(TaskId task) const { return *adapters_.at(task).source; }

  AdapterState state_of(std::uint64_t request) const {
    return manager_->adapter_state(RequestId{request});
  }

  static constexpr std::size_t kPageBytes = 512;
  static constexpr Clock::Time kPatience = std::chrono::seconds(60);

  PeftCacheOptions options_;  // for the next make_manager

  const std::shared_ptr<const LoraModelConfig> config_ = float32_model({{8, 8}});
  const std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  std::unique_ptr<PeftCacheManager> manager_;
  std::map<TaskId, TestAdapter> adapters_;
  int next_value_ = 0;
};

}  // namespace pagedlora::testing_support
