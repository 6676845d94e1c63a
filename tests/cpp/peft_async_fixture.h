// A manager whose time stands still until a test moves it, and sources that hang until it lets them
// go.
//
// A test that takes for ever when the code is wrong waits in ends_in_time(), so that it fails
// instead.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "peft_fixture.h"

namespace pagedlora::testing_support {

// Waits, by the system's clock, until it is true; false if it does not become so.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

class PeftAsyncTest : public PeftTest {
 protected:
  PeftAsyncTest() {
    options_.clock = clock_;
    options_.load_timeout = kLimit;
    options_.num_put_workers = 2;
    options_.num_ensure_workers = 2;
  }
  ~PeftAsyncTest() override { let_everything_go(); }

  void let_everything_go() {
    for (const TestAdapter& adapter : blocked_) {
      adapter.source->gate.open();
    }
    device_->copies.open();
  }

  // Over a device of ordinary memory, which a load can fill in the pass that fills the host tier.
  void make_one_pass_manager(std::size_t host_pages, std::size_t device_pages) {
    make_manager_over(one_pass_device_, host_pages, device_pages);
  }

  // Registered, with reads that hang until its gate is opened.
  TaskId register_blocked(std::uint32_t pages, std::size_t hole_bytes = 0) {
    const TaskId task = register_adapter(pages, hole_bytes);
    block(adapters_.at(task));
    return task;
  }
  void block(const TestAdapter& adapter) {
    adapter.source->gate.close();
    blocked_.push_back(adapter);
  }
  void wait_until_read_begins(TaskId task) { source_of(task).gate.wait_for_begun(1); }
  void let_time_pass() { clock_->advance(kLimit); }

  // Until the request's load has taken effect.
  void poll_until_loaded(std::uint64_t request) {
    while (state_of(request) == AdapterState::loading) {
      manager_->poll(std::chrono::seconds(1));
    }
  }

  // What poll() offers to `agree`, and nothing takes effect.
  std::vector<LoadOutcome> ended() {
    std::vector<LoadOutcome> seen;
    manager_->poll({}, [&](const std::vector<LoadOutcome>& outcomes) {
      seen = outcomes;
      return std::vector<LoadOutcome>{};
    });
    return seen;
  }
  // Lets these take effect and no others; returns the requests that failed.
  std::vector<RequestId> apply(const std::vector<LoadOutcome>& outcomes) {
    return manager_->poll({}, [&](const std::vector<LoadOutcome>&) { return outcomes; });
  }

  static constexpr Clock::Time kLimit = std::chrono::seconds(10);
  const std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  const std::shared_ptr<FakeDevice> one_pass_device_ = std::make_shared<FakeDevice>(true);
  std::vector<TestAdapter> blocked_;
};

// Runs a call on a thread of its own, so that a test can go on if it hangs.
class Waiter {
 public:
  explicit Waiter(std::function<void()> call) {
    std::packaged_task<void()> task(std::move(call));
    over_ = task.get_future();
    thread_ = std::thread(std::move(task));
  }
  ~Waiter() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Whether it returns, while nothing else happens; rethrows what it threw.
  bool ends_in_time() {
    if (over_.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      return false;
    }
    over_.get();
    return true;
  }
  // For one that hangs for ever: so does its thread.
  void abandon() { thread_.detach(); }

 private:
  std::future<void> over_;
  std::thread thread_;
};

}  // namespace pagedlora::testing_support
