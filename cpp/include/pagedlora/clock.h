// Time for limits on loads, injected so that tests and simulators decide when it passes.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace pagedlora {

class Clock {
 public:
  using Time = std::chrono::nanoseconds;  // since a start of the clock's own

  virtual ~Clock() = default;

  virtual Time now() const = 0;

  // Waits on `condition` until it is notified or `deadline` has come. May return earlier: callers
  // look again.
  virtual void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& condition,
                          Time deadline) const = 0;
};

// The system's monotonic clock.
std::shared_ptr<const Clock> steady_clock();

// Stands still until it is told to go on.
class ManualClock final : public Clock {
 public:
  void advance(Time by) { now_ += by.count(); }

  Time now() const override { return Time{now_.load()}; }
  void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& condition,
                  Time deadline) const override;

 private:
  std::atomic<Time::rep> now_{0};
};

}  // namespace pagedlora
