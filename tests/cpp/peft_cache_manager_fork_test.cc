// A child of fork() has a manager without its threads, and perhaps with its lock held for ever.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "forked.h"
#include "pagedlora/errors.h"
#include "pagedlora/fake/gate.h"
#include "pagedlora/host_device.h"
#include "pagedlora/peft_cache_manager.h"
#include "peft_async_fixture.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::holds_in_child;
using testing_support::PeftAsyncTest;
using testing_support::thrown_by;
using testing_support::Waiter;

class PeftForkTest : public PeftAsyncTest {
 protected:
  bool child_gets_rid_of_it() {
    return holds_in_child([this] {
      manager_->close();
      manager_.reset();
      return true;
    });
  }
};

// In the child the stacks of many threads are given back when one of them is joined, and with them
// what joining the next one would look at.
TEST_F(PeftForkTest, ThreadsOfTheParentAreNotJoinedInAChild) {
  make_manager_over(make_host_device(), 100'000, 100'000);  // faulted in by a thread each
  fake::Gate gate;
  gate.close();
  std::vector<std::thread> others;
  for (int i = 0; i < 32; ++i) {
    others.emplace_back([&gate] { gate.pass(); });
  }
  gate.wait_for_begun(others.size());
  EXPECT_TRUE(child_gets_rid_of_it());
  gate.open();
  for (std::thread& thread : others) {
    thread.join();
  }
}

TEST_F(PeftForkTest, CallsInAChildAreRefusedThoughTheLockIsHeld) {
  fake::Gate gate;
  gate.close();
  options_.on_evict = [&gate](Tier, TaskId) { gate.pass(); };  // with the lock
  make_manager(64, 64);
  const TaskId task = register_adapter(1);
  add(1, task);
  done(1);
  Waiter holder([this] { manager_->evict_unowned(Tier::host); });
  gate.wait_for_begun(1);
  const std::vector<std::function<void()>> calls = {
      [&] { manager_->add_request_peft(RequestId{2}, task); },
      [&] { manager_->mark_request_done(RequestId{1}); },
      [&] { manager_->poll(); },
      [&] { manager_->wait_idle(std::chrono::seconds(60)); },
      [&] { manager_->ensure_batch({}); },
      [&] { manager_->prefetch({}); },
      [&] { manager_->pin(task); },
      [&] { static_cast<void>(manager_->stats()); },
      [&] { manager_->check_invariants(); },
  };
  const std::string pid = std::to_string(::getpid());
  EXPECT_TRUE(holds_in_child([&] {
    return std::ranges::all_of(calls, [&](const std::function<void()>& call) {
      const auto error = thrown_by<InvalidArgumentError>(call);
      return error && std::string(error->what()).find(pid) != std::string::npos;
    });
  }));
  EXPECT_TRUE(child_gets_rid_of_it());
  gate.open();
  EXPECT_TRUE(holder.ends_in_time());
}

TEST_F(PeftForkTest, ALeaseIsClosedInAChildAndStaysOpenInItsParent) {
  make_manager(64, 64);
  const TaskId task = register_adapter(1);
  add(1, task);
  const RequestId request{1};
  std::shared_ptr<BatchLease> lease = manager_->ensure_batch({&request, 1});
  EXPECT_TRUE(holds_in_child([&] {
    const bool is_refused = thrown_by<InvalidArgumentError>([&] { lease->find(request); }) &&
                            !lease->is_open() && lease->has_request(request);
    lease->close();
    lease.reset();
    manager_.reset();
    return is_refused;
  }));
  EXPECT_EQ(manager_->open_lease_tasks(), std::vector<TaskId>{task});
  EXPECT_NE(lease->find(request), nullptr);
}

}  // namespace
}  // namespace pagedlora
