// Calls that make and change owners, with each of their allocations failing.
#include <gtest/gtest.h>

#include <cstdint>

#include "peft_out_of_memory_fixture.h"

namespace pagedlora {
namespace {

using testing_support::Allowed;
using testing_support::FailingNew;
using testing_support::PeftOutOfMemoryTest;
using testing_support::TestAdapter;

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

}  // namespace
}  // namespace pagedlora
