// An engine over a cache in which one thing fails: a source, a copy, or a claim that finds both tiers
// full. What fails is tried again, so that everybody is served in the end.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "thrown_by.h"

namespace pagedlora::testing_support {

// What goes wrong in a run: an event of a task's source or of the device, by number; or the call of
// that number, which claims pages, finds both tiers full.
struct Fault {
  enum Kind { none, open, read, finish, copy, claim } kind = none;
  int number = 0;
  TaskId task{PeftCacheManager::kFirstRegisteredTask};
};

struct Variant {
  std::size_t inflight = 0;      // leases that are kept open
  std::size_t device_pages = 0;  // enough for the batches, but not for all adapters
  bool is_host_memory = false;
  bool has_fillers = false;  // for Fault::claim
};
struct Life {
  TaskId task;
  bool has_started = false;
  bool is_paused = false;
};

// One run of the scenario.
struct Now {
  Variant variant;
  Fault fault;
  std::shared_ptr<FakeDevice> device;
  std::vector<TaskId> tasks;    // of 1, 2, 2, 2, 3 and 3 pages
  std::vector<TaskId> fillers;  // of 1 page
  bool is_fault_set = false;
  int num_errors = 0;
  int num_calls = 0;                // that may claim pages
  std::vector<int> claiming_calls;  // by number
  std::uint64_t first_id = 0;       // of the requests of the round
  std::map<std::uint64_t, Life> lives;
  std::set<RequestId> served;
  std::deque<std::shared_ptr<BatchLease>> leases;
  std::vector<std::shared_ptr<BatchLease>> filler_leases;
  PeftCacheStats stats;  // at the end
};

// A small engine that retries what fails, and makes one thing fail.
class FaultyEngineTest : public PeftTest {
 protected:
  using Requests = std::initializer_list<std::uint64_t>;

  void start(const Variant& variant, const Fault& fault) {
    now_ = {};
    now_.variant = variant;
    now_.fault = fault;
    now_.device = std::make_shared<FakeDevice>(variant.is_host_memory);
    adapters_.clear();
    const std::size_t num_fillers = variant.has_fillers ? kHostPages + variant.device_pages + 2 : 0;
    options_.page_bytes = kPageBytes;
    options_.host_cache_bytes = (kHostPages + (variant.has_fillers ? 1 : 0)) * kPageBytes;
    options_.device_cache_bytes = variant.device_pages * kPageBytes;
    options_.max_inflight_batches = variant.inflight + num_fillers;
    manager_ = std::make_unique<PeftCacheManager>(config_, options_, now_.device,
                                                  eviction_policy_factory("lru"));
    for (const std::uint32_t pages : {1, 2, 2, 2, 3, 3}) {
      now_.tasks.push_back(register_adapter(pages, kHoleBytes));
    }
    while (now_.fillers.size() < num_fillers) {
      now_.fillers.push_back(register_adapter(1));
    }
    add_filler(0);
  }

  // As soon as the events before the one that is to fail have happened.
  void set_fault() {
    const auto& [kind, number, task] = now_.fault;
    const auto adapter = adapters_.find(task);
    if (now_.is_fault_set || adapter == adapters_.end()) {
      return;
    }
    const FakeSource& source = *adapter->second.source;
    source.fail_open = kind == Fault::open && source.opens == number;
    source.fail_read_after = kind == Fault::read ? number : FakeSource::kNever;
    source.fail_finish = kind == Fault::finish && source.finishes == number;
    now_.device->fail_copy_after = kind == Fault::copy ? number : FakeDevice::kNever;
    now_.is_fault_set =
        source.fail_open || kind == Fault::read || source.fail_finish || kind == Fault::copy;
  }
  bool has_fired() const {
    if (!now_.is_fault_set) {
      return false;
    }
    const FakeSource& source = source_of(now_.fault.task);
    return !source.fail_open && source.fail_read_after == FakeSource::kNever &&
           !source.fail_finish && now_.device->fail_copy_after > now_.fault.number;
  }

  void call(auto action) {
    action();
    ASSERT_NO_THROW(manager_->check_invariants());
  }
  // A call that may claim pages.
  void claim(auto action) {
    const auto num_claims = [&] {
      return manager_->stats().host.misses + manager_->stats().device.misses;
    };
    set_fault();
    const int call_number = now_.num_calls++;
    const bool is_refused = now_.fault.kind == Fault::claim && now_.fault.number == call_number;
    if (is_refused) {
      expect_to_be_refused(action);
    }
    const std::uint64_t before = num_claims();
    call(action);
    if (num_claims() != before) {
      now_.claiming_calls.push_back(call_number);
      now_.is_fault_set = now_.is_fault_set || is_refused;
    }
  }
  void expect_to_be_refused(auto action) {
    const auto picture = [&] {
      return std::tuple(manager_->free_pages(Tier::host), manager_->free_pages(Tier::device),
                        manager_->resident_tasks(Tier::host),
                        manager_->resident_tasks(Tier::device), manager_->active_tasks(),
                        manager_->paused_tasks(), manager_->open_lease_tasks().size());
    };
    fill_tiers();
    const auto before = picture();
    EXPECT_EQ(std::get<0>(before) + std::get<1>(before), 0U) << "pages are free";
    try {
      action();
    } catch (const LoraCacheFullError&) {  // which prefetch does not throw: it stops
    }
    call([&] { EXPECT_EQ(picture(), before); });
    empty_tiers();
  }

  void add(std::uint64_t request, TaskId task) {
    Life& life = now_.lives[request];
    life.task = task;
    life.is_paused = false;
    claim([&] {
      const CarriedWeights weights{adapters_.at(task).plan, "digest"};
      const bool is_carried = task.value < PeftCacheManager::kFirstRegisteredTask;
      manager_->add_request_peft(id_of(request), task, is_carried ? &weights : nullptr,
                                 life.has_started);
    });
  }
  void pause(std::uint64_t request) {
    now_.lives.at(request).is_paused = true;
    call([&] { manager_->mark_request_done(id_of(request), true); });
  }
  void done(Requests requests) {
    for (const std::uint64_t request : requests) {
      now_.lives.erase(request);
      call([&] { manager_->mark_request_done(id_of(request)); });
    }
  }
  void pin(TaskId task) {
    do {
      claim([&] { manager_->pin(task); });
      settle();
    } while (manager_->load_error(task) != nullptr);
  }

  // Until nothing is under way, and nothing has failed.
  void settle() {
    do {
      call([&] { EXPECT_TRUE(manager_->wait_idle(kPatience)); });
    } while (retry_failed());
  }
  // Marks what failed done, and adds it again.
  bool retry_failed() {
    bool any = false;
    for (const auto& [request, life] : std::map(now_.lives)) {
      if (manager_->adapter_state(id_of(request)) == AdapterState::failed) {
        expect_fault(manager_->adapter_error(id_of(request)));
        call([&] { manager_->mark_request_done(id_of(request)); });
        add(request, life.task);
        if (life.is_paused) {
          pause(request);
        }
        any = true;
      }
    }
    return any;
  }
  // Throws another error, and one that comes again and again.
  void expect_fault(const std::exception_ptr& error) {
    const Fault::Kind kind = now_.fault.kind;
    const bool is_fault = kind == Fault::open     ? holds<AdapterNotFoundError>(error)
                          : kind == Fault::read   ? holds<AdapterReadError>(error)
                          : kind == Fault::finish ? holds<AdapterSourceChangedError>(error)
                                                  : holds<CopyFailure>(error);
    if (!is_fault || ++now_.num_errors > 8) {
      std::rethrow_exception(error);
    }
  }

  // Leases the tasks of the requests and compares every byte.
  void batch(Requests requests) {
    std::vector<RequestId> ids;
    for (const std::uint64_t request : requests) {
      ids.push_back(id_of(request));
    }
    do {
      if (now_.leases.size() == now_.variant.inflight) {
        close_oldest_lease();
      }
      claim([&] { now_.leases.push_back(manager_->ensure_batch(ids)); });
      for (const std::uint64_t request : requests) {
        check_lease(*now_.leases.back(), request);
      }
      retry_failed();
    } while (!now_.leases.back()->errors().empty());
  }
  void check_lease(const BatchLease& lease, std::uint64_t request) {
    if (lease.errors().contains(id_of(request))) {
      expect_fault(lease.errors().at(id_of(request)));
      return;
    }
    Life& life = now_.lives.at(request);
    life.has_started = true;
    EXPECT_EQ(lease.find(id_of(request))->task, life.task);
    EXPECT_TRUE(content_is_right(lease, id_of(request).value));
    now_.served.insert(id_of(request));
  }
  void close_oldest_lease() {
    call([&] { now_.leases.front()->close(); });
    now_.leases.pop_front();
  }

  void add_filler(std::size_t i) {
    if (i < now_.fillers.size()) {
      manager_->add_request_peft(RequestId{kFirstFiller + i}, now_.fillers[i]);
    }
  }
  // Fillers take all that can be taken: the device tier with leases, one after the other through
  // the one page of the host tier that is kept for them; the host tier as paused requests.
  void fill_tiers() {
    std::size_t i = 0;
    const auto fill = [&](auto take) {
      for (;; add_filler(++i)) {
        take(RequestId{kFirstFiller + i});
      }
    };
    EXPECT_THROW(fill([&](RequestId filler) {
                   now_.filler_leases.push_back(manager_->ensure_batch(std::array{filler}));
                   manager_->mark_request_done(filler);
                 }),
                 LoraCacheFullError);
    EXPECT_THROW(fill([&](RequestId filler) { manager_->mark_request_done(filler, true); }),
                 LoraCacheFullError);
  }
  void empty_tiers() {
    now_.filler_leases.clear();
    for (std::size_t i = 0; i < now_.fillers.size(); ++i) {
      manager_->mark_request_done(RequestId{kFirstFiller + i});
    }
    add_filler(0);
  }

  void expect_nothing_left() {
    now_.leases.clear();
    manager_->mark_request_done(RequestId{kFirstFiller});
    settle();
    for (const Tier tier : {Tier::host, Tier::device}) {
      call([&] { manager_->evict_unowned(tier); });
      EXPECT_EQ(manager_->free_pages(tier), manager_->max_pages(tier));
      EXPECT_EQ(manager_->resident_tasks(tier), 0U);
    }
    EXPECT_TRUE(manager_->active_tasks().empty() && manager_->paused_tasks().empty());
    EXPECT_TRUE(manager_->open_lease_tasks().empty());
    EXPECT_TRUE(comes_true([&] {
      return std::ranges::all_of(
          adapters_, [](const auto& item) { return item.second.source->live_readers == 0; });
    }));
    now_.stats = manager_->stats();
    manager_.reset();
    EXPECT_TRUE(comes_true([&] { return now_.device.use_count() == 1; })) << "a job was kept";
  }

  RequestId id_of(std::uint64_t request) const { return RequestId{now_.first_id + request}; }
  static bool comes_true(auto condition) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    return condition();
  }

  static constexpr std::size_t kHostPages = 8;
  static constexpr std::size_t kHoleBytes = 10'000;  // each matrix is a read of its own
  static constexpr std::uint64_t kFirstFiller = 1000;

  Now now_;
};

}  // namespace pagedlora::testing_support
