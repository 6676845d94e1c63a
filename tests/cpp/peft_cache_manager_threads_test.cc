// Calls from several threads at once; to be run under ThreadSanitizer (design 3.4, L8).
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <random>
#include <thread>

#include "pagedlora/errors.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_fixture.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::num_steps;
using testing_support::PeftTest;

class PeftThreadsTest : public PeftTest {
 protected:
  static constexpr std::uint32_t kThreads = 4;

  // Runs body(thread, rng) on every thread.
  template <class Body>
  static void on_all_threads(Body body) {
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([i, body] {
        std::mt19937 rng(i + 1);
        body(i, rng);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

TEST_F(PeftThreadsTest, L8_CallsOfAllKindsMayMeet) {
  make_manager(10, 6);
  std::vector<TaskId> tasks;
  for (std::uint32_t i = 0; i < 8; ++i) {
    tasks.push_back(register_adapter(1 + i % 3));
  }
  std::atomic<int> wrong{0};
  on_all_threads([&](std::uint32_t thread, std::mt19937& rng) {
    for (int step = 0; step < num_steps(20'000); ++step) {
      const RequestId request{thread * 100 + rng() % 4};
      try {
        switch (rng() % 8) {
          case 0:
          case 1:
            manager_->add_request_peft(request, tasks[rng() % tasks.size()]);
            break;
          case 2:
          case 3:
            manager_->mark_request_done(request, rng() % 2 == 0);
            break;
          case 4: {
            const std::vector<RequestId> batch{request, RequestId{thread * 100 + rng() % 4}};
            const auto lease = manager_->ensure_batch(batch, rng() % 8 == 0);
            if (rng() % 2 == 0) {
              lease->close();
            }
            break;
          }
          case 5: {
            const TaskId task = tasks[rng() % tasks.size()];
            const auto check = [&](const TaskPages& pages, const AdapterPlan& /*plan*/) {
              wrong += holds_adapter(pages, *config_, adapters_.at(task)) ? 0 : 1;
            };
            manager_->read_task(task, rng() % 2 == 0 ? Tier::host : Tier::device, check);
            break;
          }
          case 6:
            manager_->evict_unowned(rng() % 2 == 0 ? Tier::host : Tier::device);
            manager_->reset_device_cache();
            break;
          default:
            manager_->check_invariants();
            static_cast<void>(manager_->stats());
            static_cast<void>(manager_->active_tasks());
            static_cast<void>(manager_->is_task_cached(tasks[0], Tier::device));
        }
      } catch (const Error&) {  // full, conflicts, not cached: the others are in the way
      }
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST_F(PeftThreadsTest, L2_OfBatchesThatMeetOnlyTheLastKeepsItsLease) {
  make_manager(8, 8);
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    add(thread, register_adapter(1));
  }
  std::vector<std::vector<std::shared_ptr<BatchLease>>> leases(kThreads);
  std::barrier together(kThreads);
  on_all_threads([&](std::uint32_t thread, std::mt19937& /*rng*/) {
    for (int step = 0; step < num_steps(5'000); ++step) {
      const std::vector<RequestId> batch{RequestId{thread}};
      together.arrive_and_wait();
      leases[thread].push_back(manager_->ensure_batch(batch));
    }
  });
  std::ptrdiff_t open = 0;
  for (const auto& of_thread : leases) {
    open += std::ranges::count_if(of_thread, [](const auto& lease) { return lease->is_open(); });
  }
  EXPECT_EQ(open, 1);
  manager_.reset();  // and no lease that outlives it reaches back
  leases.clear();
}

TEST_F(PeftThreadsTest, ALeaseMayBeClosedByAnotherThreadThanItsBatchs) {
  make_manager(8, 2);
  for (std::uint64_t request = 0; request < 2; ++request) {
    add(request, register_adapter(2));
  }
  for (int step = 0; step < num_steps(2'000); ++step) {
    const auto lease = ensure({static_cast<std::uint64_t>(step % 2)});
    std::thread closer([&] { lease->close(); });
    static_cast<void>(manager_->free_pages(Tier::device));
    lease->close();
    closer.join();
    EXPECT_FALSE(lease->is_open());
  }
}

}  // namespace
}  // namespace pagedlora
