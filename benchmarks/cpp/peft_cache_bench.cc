// What the cache itself costs an engine, without weights worth speaking of.
//
//   touch_done     add_request_peft and mark_request_done of a request whose task is resident, among
//                  10^4 and 10^6 tasks; beside it the least that an LRU cache can do: find the task in
//                  a hash map, move it to the front of a list, and back again, each under a mutex
//   evict_admit    the same when the task is not resident and another one must go, 10^2 to 10^6 tasks
//   ensure_batch   64 resident requests, with the heap allocations counted
//
// Rounds are interleaved; medians of the thread's CPU time are printed as lines of JSON.
//
// Usage: peft_cache_bench [rounds] [the one benchmark to run]
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pagedlora/peft_cache_manager.h"

namespace {

std::atomic<std::size_t> allocations{0};

}  // namespace

// Counts what every part of the program allocates.
void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }

namespace pagedlora {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kCallsPerRound = 20'000;

double cpu_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

// Nanoseconds per call.
template <class Body>
double time_per_call(std::size_t calls, Body body) {
  const double start = cpu_seconds();
  for (std::size_t i = 0; i < calls; ++i) {
    body(i);
  }
  return (cpu_seconds() - start) * 1e9 / static_cast<double>(calls);
}

// One module of 8 x 8, rank 8: one page per adapter, all of the same bytes.
class Fleet {
 public:
  Fleet(std::size_t num_tasks, std::size_t host_pages, std::size_t device_pages) {
    std::vector<LoraModule> modules;
    modules.push_back({"module", -1, -1, 8, 8});
    config_ = std::make_shared<const LoraModelConfig>(std::move(modules), Dtype::float32, 64);
    PeftCacheOptions options;
    options.host_cache_bytes = host_pages * kPageBytes;
    options.device_cache_bytes = device_pages * kPageBytes;
    options.page_bytes = kPageBytes;
    manager_ = std::make_unique<PeftCacheManager>(config_, options, make_host_device(),
                                                  eviction_policy_factory("lru"));
    const auto source = make_memory_source(bytes_, nullptr, "zeros");
    const auto plan = std::make_shared<const AdapterPlan>(
        *config_,
        std::vector{
            PlannedRow{ModuleIndex{0}, 8, {0, Dtype::float32}, {256, Dtype::float32}, 1.0F}},
        source);
    for (std::size_t i = 0; i < num_tasks; ++i) {
      tasks_.push_back(manager_->register_task(plan));
    }
  }

  PeftCacheManager& manager() { return *manager_; }
  TaskId task(std::size_t i) const { return tasks_[i]; }
  std::size_t size() const { return tasks_.size(); }

  void make_resident(std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      manager_->add_request_peft(RequestId{i}, task(i));
    }
    if (!manager_->wait_idle(std::chrono::minutes(5))) {
      std::fprintf(stderr, "the loads take too long\n");
      std::exit(1);
    }
  }

 private:
  std::vector<std::byte> bytes_{512};
  std::shared_ptr<const LoraModelConfig> config_;
  std::unique_ptr<PeftCacheManager> manager_;
  std::vector<TaskId> tasks_;
};

// A list in order of use and a map into it, under a mutex.
class ListCache {
 public:
  explicit ListCache(std::size_t num_tasks) {
    for (std::uint64_t task = 0; task < num_tasks; ++task) {
      order_.push_back(task);
      places_[task] = std::prev(order_.end());
    }
  }
  void touch(std::uint64_t task) {
    const std::scoped_lock lock(mutex_);
    order_.splice(order_.begin(), order_, places_.at(task));
  }

 private:
  std::mutex mutex_;
  std::list<std::uint64_t> order_;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places_;
};

std::vector<std::size_t> random_order(std::size_t size, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<std::size_t> order(kCallsPerRound);
  std::ranges::generate(order, [&] { return rng() % size; });
  return order;
}

void bench_touch_done(std::size_t num_tasks, int rounds) {
  Fleet fleet(num_tasks, num_tasks, 64);
  fleet.make_resident(0, num_tasks);
  for (std::size_t i = 0; i < num_tasks; ++i) {
    fleet.manager().mark_request_done(RequestId{i});
  }
  ListCache reference(num_tasks);
  std::vector<double> ours;
  std::vector<double> theirs;
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    const auto order = random_order(num_tasks, static_cast<std::uint32_t>(round));
    ours.push_back(time_per_call(kCallsPerRound, [&](std::size_t i) {
      const RequestId request{i};
      fleet.manager().add_request_peft(request, fleet.task(order[i]));
      fleet.manager().mark_request_done(request);
    }));
    theirs.push_back(time_per_call(kCallsPerRound, [&](std::size_t i) {
      reference.touch(order[i]);
      reference.touch(order[i]);
    }));
    ratios.push_back(theirs.back() / ours.back());
  }
  std::printf(
      "{\"benchmark\": \"touch_done\", \"tasks\": %zu, \"ns\": %.0f, \"reference_ns\": %.0f, "
      "\"ratio\": %.2f}\n",
      num_tasks, median(ours), median(theirs), median(ratios));
}

// Half of the tasks fit the host tier; each call brings one in that was evicted longest ago.
void bench_evict_admit(std::size_t num_tasks, int rounds) {
  Fleet fleet(num_tasks, num_tasks / 2, 64);
  fleet.make_resident(0, num_tasks / 2);
  for (std::size_t i = 0; i < num_tasks; ++i) {
    fleet.manager().mark_request_done(RequestId{i});
  }
  const std::size_t calls = 200;
  std::size_t next = num_tasks / 2;
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    times.push_back(time_per_call(calls, [&](std::size_t /*i*/) {
      const TaskId task = fleet.task(next++ % num_tasks);
      fleet.manager().add_request_peft(RequestId{0}, task);
      fleet.manager().mark_request_done(RequestId{0});
    }));
    fleet.manager().wait_idle(std::chrono::minutes(1));
  }
  std::printf("{\"benchmark\": \"evict_admit\", \"tasks\": %zu, \"ns\": %.0f}\n", num_tasks,
              median(times));
}

void bench_ensure_batch(int rounds) {
  constexpr std::size_t kRequests = 64;
  Fleet fleet(kRequests, kRequests, kRequests);
  fleet.make_resident(0, kRequests);
  std::vector<RequestId> batch;
  for (std::size_t i = 0; i < kRequests; ++i) {
    batch.push_back(RequestId{i});
  }
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    fleet.manager().ensure_batch(batch)->close();
  }
  std::vector<double> times;
  times.reserve(static_cast<std::size_t>(rounds));  // not to be counted
  std::size_t allocated = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::size_t before = allocations;
    times.push_back(time_per_call(
        500, [&](std::size_t /*i*/) { fleet.manager().ensure_batch(batch)->close(); }));
    allocated += allocations - before;
  }
  std::printf(
      "{\"benchmark\": \"ensure_batch\", \"requests\": %zu, \"ns\": %.0f, "
      "\"allocations_per_call\": %.3f}\n",
      kRequests, median(times),
      static_cast<double>(allocated) / (500.0 * static_cast<double>(rounds)));
}

}  // namespace
}  // namespace pagedlora

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const auto is_wanted = [&](std::string_view name) { return argc < 3 || name == argv[2]; };
  if (is_wanted("touch_done")) {
    for (const std::size_t num_tasks : {10'000U, 1'000'000U}) {
      pagedlora::bench_touch_done(num_tasks, rounds);
    }
  }
  if (is_wanted("evict_admit")) {
    for (const std::size_t num_tasks : {100U, 1'000U, 10'000U, 100'000U, 1'000'000U}) {
      pagedlora::bench_evict_admit(num_tasks, rounds);
    }
  }
  if (is_wanted("ensure_batch")) {
    pagedlora::bench_ensure_batch(rounds);
  }
  return 0;
}
