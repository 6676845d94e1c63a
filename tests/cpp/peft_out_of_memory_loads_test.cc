// Calls that bring copies in, let them take effect, hold them and give them up, with each of their
// allocations failing.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dying_source.h"
#include "peft_out_of_memory_fixture.h"

namespace pagedlora {
namespace {

using testing_support::Allowed;
using testing_support::DyingSource;
using testing_support::FailingNew;
using testing_support::PeftOutOfMemoryTest;
using testing_support::TestAdapter;
using testing_support::Waiter;

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

class PeftOutOfMemoryAtTheEndTest : public PeftOutOfMemoryTest {
 protected:
  // A request whose load is queued, and its source calls the manager when it is destroyed.
  void queue_dying_source(std::uint64_t request) {
    const TestAdapter adapter = adapter_of(1);
    const auto dies = [manager = manager_.get()] { static_cast<void>(manager->stats()); };
    const auto source = std::make_shared<DyingSource>(adapter.source, dies);
    const CarriedWeights weights{
        std::make_shared<const AdapterPlan>(*config_, adapter.plan->rows(), source), "digest"};
    manager_->add_request_peft(RequestId{request}, TaskId{request}, &weights);
  }
};

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
TEST_F(PeftOutOfMemoryAtTheEndTest, ClosingDestroysNothingUnderTheLock) {
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
