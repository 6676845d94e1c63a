// One call at a time, once for each of its allocations with that allocation failing: nothing is lost,
// a call that throws has changed nothing, and the same call works once there is memory again.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dying_source.h"
#include "failing_new.h"
#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::comes_true;
using testing_support::DyingSource;
using testing_support::FailingNew;
using testing_support::holds;
using testing_support::PeftAsyncTest;
using testing_support::TestAdapter;
using testing_support::Waiter;

// What a call may change although it throws.
enum class Allowed {
  nothing,
  evictions,    // victims stay evicted
  revocations,  // and owners that gave their place to one that has started wait again
  progress,     // loads of others that ended take effect, or those of a window were begun
};

struct Reads final : PageUse {
  bool is_over() const override { return over; }
  std::atomic<bool> over{false};
};

// Closed leases leave reads behind, and nothing is allocated for that.
class ReadingDevice final : public Device {
 public:
  const std::shared_ptr<Reads> reads = std::make_shared<Reads>();

  std::string_view name() const override { return "reading"; }
  MemoryInfo memory_info() const override { return memory_->memory_info(); }
  std::shared_ptr<const PageUse> launched_work(void* /*stream*/) override { return reads; }
  std::byte* try_allocate(std::size_t bytes) override { return memory_->try_allocate(bytes); }
  void deallocate(std::byte* arena, std::size_t bytes) noexcept override {
    memory_->deallocate(arena, bytes);
  }
  void prefault(std::byte* begin, std::size_t bytes) noexcept override {
    memory_->prefault(begin, bytes);
  }
  void copy_from_host(std::span<const CopyRun> runs) override { memory_->copy_from_host(runs); }
  void copy_to_host(std::span<const CopyRun> runs) override { memory_->copy_to_host(runs); }

 private:
  const std::shared_ptr<Device> memory_ = make_host_device();
};

class PeftOutOfMemoryTest : public PeftAsyncTest {
 protected:
  using Step = std::function<void()>;

  // `prepare` brings a manager into the state in which `call` is made.
  struct Scenario {
    Step prepare;
    Step call;
    Allowed allowed = Allowed::nothing;
  };

  PeftOutOfMemoryTest() {
    options_.clock = nullptr;
    options_.load_timeout = std::chrono::hours(1);
    options_.num_put_workers = 1;
  }

  // With each allocation of the call failing in turn, until it has no more.
  void run(const Scenario& scenario) {
    int number = 0;
    for (bool has_failed = true; has_failed; ++number) {
      SCOPED_TRACE("allocation " + std::to_string(number));
      has_failed = run_once(scenario, number);
      if (HasFailure()) {
        return;
      }
    }
    num_allocations_ = number - 1;
  }

  // The same for the allocations of the workers, until what the call began has ended.
  void run_with_failing_workers(const Scenario& scenario) {
    bool has_failed = true;
    for (int number = 0; has_failed; ++number) {
      SCOPED_TRACE("allocation " + std::to_string(number) + " of the workers");
      start(scenario);
      FailingNew::arm(FailingNew::Who::other_threads, number);
      scenario.call();
      const bool is_idle = manager_->wait_idle(std::chrono::seconds(20));
      FailingNew::disarm();
      has_failed = FailingNew::has_failed();
      ASSERT_TRUE(is_idle) << "a load without end";
      ASSERT_NO_THROW(manager_->check_invariants());
      for (const auto& [request, task] : requests_) {
        const std::exception_ptr error = manager_->adapter_error(RequestId{request});
        ASSERT_TRUE(error == nullptr || holds<std::bad_alloc>(error));
      }
      finish();
    }
  }

  // A request that the scenario adds, whose content is compared in the end.
  void own(std::uint64_t request, TaskId task) { requests_[request] = task; }
  void add_owner(std::uint64_t request, TaskId task) {
    add(request, task);
    own(request, task);
  }
  TaskId register_on_device(std::uint32_t pages) {
    const TaskId task = register_adapter(pages);
    add(kSetUpRequest, task);
    ensure_and_close({kSetUpRequest});
    done(kSetUpRequest);
    return task;
  }
  // A request whose load is queued, and its source calls the manager when it is destroyed.
  void queue_dying_source(std::uint64_t request) {
    const TestAdapter adapter = adapter_of(1);
    const auto dies = [manager = manager_.get()] { static_cast<void>(manager->stats()); };
    const auto source = std::make_shared<DyingSource>(adapter.source, dies);
    const CarriedWeights weights{
        std::make_shared<const AdapterPlan>(*config_, adapter.plan->rows(), source), "digest"};
    manager_->add_request_peft(RequestId{request}, TaskId{request}, &weights);
  }
  void wait_until_ended(std::size_t num_loads) {
    ASSERT_TRUE(comes_true([&] { return ended().size() == num_loads; }));
  }

  static constexpr std::uint64_t kSetUpRequest = 1000;
  static constexpr TaskId kCarriedVictim{5};
  std::map<std::uint64_t, TaskId> requests_;
  std::map<std::uint64_t, std::string> carried_;  // digests, by request
  std::shared_ptr<BatchLease> lease_;             // of the call
  std::shared_ptr<BatchLease> kept_lease_;        // made before it
  int num_allocations_ = 0;

 private:
  using Copies = std::set<std::pair<Tier, TaskId>>;

  struct Picture {
    std::unordered_map<TaskId, std::set<RequestId>> active;
    std::unordered_map<TaskId, std::set<RequestId>> paused;
    std::map<std::uint64_t, bool> started;
    std::size_t free_host = 0;
    std::size_t free_device = 0;
    Copies resident;
    std::size_t num_open = 0;

    friend bool operator==(const Picture&, const Picture&) = default;
  };

  void start(const Scenario& scenario) {
    lease_.reset();
    manager_.reset();
    adapters_.clear();
    requests_.clear();
    carried_.clear();
    scenario.prepare();
    lease_.reset();
    // Now no thread has to be begun, or has something to end.
    ASSERT_NO_THROW(manager_->check_invariants());
  }

  Picture picture() const {
    Picture now;
    now.active = manager_->active_tasks();
    now.paused = manager_->paused_tasks();
    for (const auto& [request, task] : requests_) {
      now.started[request] = manager_->has_started(RequestId{request});
    }
    now.free_host = manager_->free_pages(Tier::host);
    now.free_device = manager_->free_pages(Tier::device);
    for (const Tier tier : {Tier::host, Tier::device}) {
      for (const auto& [task, adapter] : adapters_) {
        if (manager_->is_task_cached(task, tier)) {
          now.resident.emplace(tier, task);
        }
      }
    }
    now.num_open = manager_->open_lease_tasks().size();
    return now;
  }

  // Whether an allocation failed.
  bool run_once(const Scenario& scenario, int number) {
    start(scenario);
    const Picture before = picture();
    std::exception_ptr error;
    FailingNew::arm(FailingNew::Who::this_thread, number);
    try {
      scenario.call();
    } catch (...) {
      FailingNew::disarm();
      error = std::current_exception();
    }
    FailingNew::disarm();
    const bool has_failed = FailingNew::has_failed();
    EXPECT_NO_THROW(manager_->check_invariants());
    if (error != nullptr) {
      EXPECT_TRUE(has_failed && holds<std::bad_alloc>(error));
      expect_unchanged(before, scenario.allowed);
      EXPECT_NO_THROW(scenario.call()) << "with memory";
      EXPECT_NO_THROW(manager_->check_invariants());
    }
    finish();
    return has_failed;
  }

  void expect_unchanged(const Picture& before, Allowed allowed) {
    const Picture after = picture();
    if (allowed == Allowed::revocations) {
      EXPECT_EQ(manager_->task_of(RequestId{1}), std::nullopt);
    } else {
      EXPECT_EQ(after.active, before.active);
    }
    EXPECT_EQ(after.paused, before.paused);
    EXPECT_EQ(after.started, before.started);
    EXPECT_EQ(after.num_open, before.num_open);
    if (allowed == Allowed::nothing) {
      EXPECT_TRUE(after == before) << "residency has changed";
    } else if (allowed == Allowed::progress) {
      EXPECT_TRUE(std::ranges::includes(after.resident, before.resident));
    } else {
      EXPECT_TRUE(std::ranges::includes(before.resident, after.resident));
    }
  }

  // Everybody is served in the end, and nothing is left when everybody is done.
  void finish() {
    ASSERT_TRUE(manager_->wait_idle(kPatience));
    manager_->poll();
    for (const auto& [request, task] : requests_) {
      for (int i = 0; i < 3 && state_of(request) != AdapterState::ready; ++i) {
        done(request);
        add_again(request, task);
        ASSERT_TRUE(manager_->wait_idle(kPatience));
      }
      ASSERT_EQ(state_of(request), AdapterState::ready);
      add_again(request, task);  // if it is paused
      ASSERT_TRUE(content_is_right(*ensure({request}), request));
      ASSERT_NO_THROW(manager_->check_invariants());
    }
    lease_.reset();
    for (const auto& [request, task] : requests_) {
      done(request);
    }
    manager_->prefetch({});
    for (const Tier tier : {Tier::host, Tier::device}) {
      manager_->evict_unowned(tier);
      ASSERT_NO_THROW(manager_->check_invariants());
    }
    const std::size_t pinned = pinned_pages_;
    EXPECT_EQ(manager_->free_pages(Tier::host) + pinned, manager_->max_pages(Tier::host));
    EXPECT_EQ(manager_->free_pages(Tier::device), manager_->max_pages(Tier::device));
  }
  void add_again(std::uint64_t request, TaskId task) {
    const auto carried = carried_.find(request);
    const std::string digest = carried == carried_.end() ? std::string() : carried->second;
    const CarriedWeights weights{adapters_.at(task).plan, digest};
    manager_->add_request_peft(RequestId{request}, task, digest.empty() ? nullptr : &weights, true);
  }

 protected:
  std::size_t pinned_pages_ = 0;
};

TEST_F(PeftOutOfMemoryTest, RegisteringATask) {
  TestAdapter adapter;
  run({[&] {
         make_manager(4, 4);
         adapter = adapter_of(2);
       },
       [&] {
         const TaskId task = manager_->register_task(adapter.plan);
         FailingNew::disarm();
         adapters_[task] = adapter;
         add_owner(1, task);
       }});
  EXPECT_GT(num_allocations_, 3);
}

TEST_F(PeftOutOfMemoryTest, AddingTheFirstRequestOfAnAbsentTask) {
  TaskId task{};
  const Scenario scenario{[&] {
                            make_manager(4, 4);
                            task = register_adapter(2);
                            own(1, task);
                          },
                          [&] { start_to_add(1, task); }};
  run(scenario);
  EXPECT_GT(num_allocations_, 10);
  run_with_failing_workers(scenario);
}

TEST_F(PeftOutOfMemoryTest, AddingARequestThatEvictsOthers) {
  TaskId task{};
  run({[&] {
         make_manager(4, 4);
         for (const std::uint32_t pages : {1, 2}) {
           add(kSetUpRequest, register_adapter(pages));
           done(kSetUpRequest);
         }
         add(kSetUpRequest, kCarriedVictim.value, adapter_of(1), "digest");
         done(kSetUpRequest);
         task = register_adapter(4);
         own(1, task);
       },
       [&] { start_to_add(1, task); }, Allowed::evictions});
}

TEST_F(PeftOutOfMemoryTest, AddingARequestWhoseClaimCancelsALoad) {
  TaskId task{};
  run({[&] {
         let_everything_go();
         make_manager(2, 2);
         const TaskId hanging = register_blocked(2);
         start_to_add(kSetUpRequest, hanging);
         wait_until_read_begins(hanging);
         done(kSetUpRequest);
         task = register_adapter(2);
         own(1, task);
       },
       [&] {
         start_to_add(1, task);
         FailingNew::disarm();
         let_everything_go();
       },
       Allowed::evictions});
}

TEST_F(PeftOutOfMemoryTest, AddingAStartedRequestThatTakesThePlaceOfOthers) {
  TaskId task{};
  run({[&] {
         make_manager(4, 4);
         add(kSetUpRequest, register_adapter(3));
         task = register_adapter(4);
         own(1, task);
       },
       [&] { start_to_add(1, task, true); }, Allowed::revocations});
}

TEST_F(PeftOutOfMemoryTest, AddingARequestWithWeights) {
  constexpr TaskId kTask{7};
  CarriedWeights weights;
  const Scenario scenario{[&] {
                            make_manager(4, 4);
                            adapters_[kTask] = adapter_of(2);
                            weights = {adapters_[kTask].plan,
                                       "a digest that is too long to be stored in place"};
                            own(1, kTask);
                            carried_[1] = weights.digest;
                          },
                          [&] { manager_->add_request_peft(RequestId{1}, kTask, &weights); }};
  run(scenario);
  EXPECT_GT(num_allocations_, 12);
  run_with_failing_workers(scenario);
}

TEST_F(PeftOutOfMemoryTest, AddingARequestWithOtherWeightsUnderATaskIdThatNobodyUses) {
  constexpr TaskId kTask{7};
  CarriedWeights weights;
  run({[&] {
         make_manager(4, 4);
         add(kSetUpRequest, kTask.value, adapter_of(1), "old");
         ensure_and_close({kSetUpRequest});
         done(kSetUpRequest);
         adapters_[kTask] = adapter_of(2);
         weights = {adapters_[kTask].plan, "new"};
         own(1, kTask);
         carried_[1] = weights.digest;
       },
       [&] { manager_->add_request_peft(RequestId{1}, kTask, &weights); }, Allowed::evictions});
}

TEST_F(PeftOutOfMemoryTest, AddingARequestAgainAndAnotherOfItsTask) {
  TaskId task{};
  for (const std::uint64_t request : {1, 2, 3}) {
    run({[&] {
           make_manager(4, 4);
           task = register_adapter(2);
           add_owner(1, task);
           own(2, task);
           add_owner(3, task);
           pause(3);
         },
         [&] { start_to_add(request, task); }});
  }
}

TEST_F(PeftOutOfMemoryTest, AddingARequestWhoseTaskIsOnTheDeviceOnly) {
  TaskId task{};
  const Scenario scenario{[&] {
                            make_manager(4, 4);
                            task = register_on_device(2);
                            manager_->evict_unowned(Tier::host);
                            own(1, task);
                          },
                          [&] { start_to_add(1, task); }};
  run(scenario);
  EXPECT_GT(num_allocations_, 8);
  run_with_failing_workers(scenario);
}

TEST_F(PeftOutOfMemoryTest, PrefetchingAWindow) {
  std::vector<TaskId> window;
  const Scenario scenario{[&] {
                            make_manager(4, 4);
                            window = {register_adapter(1), register_adapter(1),
                                      register_adapter(1)};
                            add(kSetUpRequest, window[0]);
                            done(kSetUpRequest);
                            for (std::uint64_t i = 0; i < 3; ++i) {
                              own(i, window[i]);
                            }
                          },
                          [&] { manager_->prefetch(window); }, Allowed::progress};
  run(scenario);
  EXPECT_GT(num_allocations_, 20);
}

TEST_F(PeftOutOfMemoryTest, EnsuringABatch) {
  for (const bool is_one_pass : {false, true}) {
    const Scenario scenario{[&] {
                              if (is_one_pass) {
                                make_one_pass_manager(8, 6);
                              } else {
                                make_manager(8, 6);
                              }
                              add_owner(1, register_adapter(2));
                              ensure_and_close({1});
                              add_owner(2, register_adapter(2));  // on the host
                              const TaskId absent = register_blocked(2);
                              own(3, absent);
                              start_to_add(3, absent);
                              let_everything_go();
                            },
                            [&] {
                              const std::array<RequestId, 5> requests{RequestId{1}, RequestId{99},
                                                                      RequestId{3}, RequestId{2},
                                                                      RequestId{1}};
                              lease_ = manager_->ensure_batch(requests);
                            },
                            Allowed::progress};
    run(scenario);
    EXPECT_GT(num_allocations_, 10);
    run_with_failing_workers(scenario);
  }
}

TEST_F(PeftOutOfMemoryTest, EnsuringABatchThatEvictsOthers) {
  run({[&] {
         make_manager(8, 2);
         add(kSetUpRequest, register_adapter(2));
         ensure_and_close({kSetUpRequest});
         done(kSetUpRequest);
         add_owner(1, register_adapter(2));
       },
       [&] {
         const RequestId request{1};
         lease_ = manager_->ensure_batch({&request, 1}, true);
       },
       Allowed::evictions});
}

TEST_F(PeftOutOfMemoryTest, EnsuringTheFirstBatchOfAll) {
  run({[&] {
         make_manager(4, 4);
         add_owner(1, register_adapter(2));
       },
       [&] {
         const RequestId request{1};
         lease_ = manager_->ensure_batch({&request, 1});
       },
       Allowed::progress});
}

TEST_F(PeftOutOfMemoryTest, ClosingLeasesWhoseReadsGoOn) {
  options_.max_inflight_batches = 4;
  std::vector<std::shared_ptr<BatchLease>> leases;
  std::shared_ptr<ReadingDevice> device;
  run({[&] {
         leases.clear();
         device = std::make_shared<ReadingDevice>();
         make_manager_over(device, 8, 8);
         const std::array requests{RequestId{1}, RequestId{2}};
         for (const RequestId request : requests) {
           add_owner(request.value, register_adapter(2));
         }
         for (int i = 0; i < 3; ++i) {
           leases.push_back(manager_->ensure_batch(requests));
         }
       },
       [&] {
         for (const auto& lease : leases) {
           lease->close();
         }
         device->reads->over = true;
       }});
  EXPECT_EQ(num_allocations_, 0) << "it cannot fail";
}

TEST_F(PeftOutOfMemoryTest, PollingWhatHasEnded) {
  run({[&] {
         make_manager(8, 8);
         for (std::uint64_t request = 1; request <= 3; ++request) {
           const TaskId task = register_adapter(1);
           own(request, task);
           source_of(task).fail_open = request == 2;
           start_to_add(request, task);
           start_to_add(10 + request, task);
           own(10 + request, task);
         }
         wait_until_ended(3);
       },
       [&] { manager_->poll(); }, Allowed::progress});
  EXPECT_GT(num_allocations_, 2);
}

TEST_F(PeftOutOfMemoryTest, PollingARefillThatFailed) {
  TaskId task{};
  run({[&] {
         make_manager(4, 4);
         task = register_on_device(2);
         manager_->evict_unowned(Tier::host);
         device_->fail_copy_after = 0;
         own(1, task);
         start_to_add(1, task);
         wait_until_ended(1);
       },
       [&] { manager_->poll(); }, Allowed::progress});
  EXPECT_GT(num_allocations_, 5);
}

TEST_F(PeftOutOfMemoryTest, PollingALoadWhoseTimeIsUp) {
  options_.clock = clock_;
  run({[&] {
         make_manager(4, 4);
         const TaskId task = register_blocked(2);
         own(1, task);
         start_to_add(1, task);
         wait_until_read_begins(task);
         clock_->advance(options_.load_timeout);
       },
       [&] {
         manager_->poll();
         FailingNew::disarm();
         let_everything_go();
       },
       Allowed::progress});
}

TEST_F(PeftOutOfMemoryTest, PollingWithAGroup) {
  run({[&] {
         make_manager(4, 4);
         const TaskId task = register_adapter(2);
         own(1, task);
         start_to_add(1, task);
         wait_until_ended(1);
       },
       [&] {
         manager_->poll({}, [](const std::vector<LoadOutcome>& outcomes) {
           std::vector<LoadOutcome> agreed = outcomes;
           for (LoadOutcome& outcome : agreed) {
             outcome.loaded = false;
           }
           return agreed;
         });
       },
       Allowed::progress});
}

// Closing lets two queued loads fail. The first is over, and its source dies, when the second finds no
// memory.
TEST_F(PeftOutOfMemoryTest, ClosingDestroysNothingUnderTheLock) {
  bool has_failed = true;
  for (int number = 0; has_failed; ++number) {
    SCOPED_TRACE("allocation " + std::to_string(number));
    let_everything_go();
    make_manager(8, 8);
    const TaskId blocking = register_blocked(1);
    start_to_add(1, blocking);
    wait_until_read_begins(blocking);
    queue_dying_source(2);
    queue_dying_source(3);
    Waiter closing([&has_failed, number, manager = manager_.get()] {
      FailingNew::arm(FailingNew::Who::this_thread, number);
      try {
        manager->close();
      } catch (const std::bad_alloc&) {
      }
      FailingNew::disarm();
      has_failed = FailingNew::has_failed();
      manager->check_invariants();
      manager->close();
    });
    if (!closing.ends_in_time()) {
      closing.abandon();
      static_cast<void>(manager_.release());
      FAIL() << "it waits for the lock that it holds";
    }
    EXPECT_EQ(state_of(3), AdapterState::failed);
    EXPECT_EQ(manager_->free_pages(Tier::host), 8U);
  }
}

TEST_F(PeftOutOfMemoryTest, PausingAndEnding) {
  for (const bool pause : {false, true}) {
    run({[&] {
           make_manager(4, 4);
           add_owner(1, register_adapter(2));
           add_owner(2, register_adapter(2));
         },
         [&] { manager_->mark_request_done(RequestId{1}, pause); }});
    EXPECT_EQ(num_allocations_, 0);
  }
}

TEST_F(PeftOutOfMemoryTest, PinningAndUnpinning) {
  TaskId task{};
  for (const bool is_absent : {false, true}) {
    run({[&] {
           make_manager(4, 4);
           task = register_adapter(2);
           own(1, task);
           if (!is_absent) {
             add(1, task);
           }
         },
         [&] {
           manager_->pin(task);
           manager_->unpin(task);
         }});
  }
}

TEST_F(PeftOutOfMemoryTest, UnregisteringATask) {
  TaskId task{};
  run({[&] {
         make_manager(4, 4);
         task = register_on_device(2);
       },
       [&] {
         manager_->unregister_task(task);
         adapters_.erase(task);
       }});
}

TEST_F(PeftOutOfMemoryTest, EvictingWhatIsUnowned) {
  for (const Tier tier : {Tier::host, Tier::device}) {
    run({[&] {
           make_manager(4, 4);
           register_on_device(2);
           register_on_device(1);
         },
         [&] { manager_->evict_unowned(tier); }});
    EXPECT_GT(num_allocations_, 0);
  }
}

}  // namespace
}  // namespace pagedlora
