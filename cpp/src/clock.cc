#include "pagedlora/clock.h"

namespace pagedlora {
namespace {

class SteadyClock final : public Clock {
 public:
  Time now() const override {
    return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
  }
  void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& condition,
                  Time deadline) const override {
    condition.wait_until(lock, std::chrono::steady_clock::time_point(deadline));
  }
};

}  // namespace

std::shared_ptr<const Clock> steady_clock() {
  static const std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>();
  return clock;
}

// Nobody is told when the time is set forward: whoever waits looks at it every millisecond.
void ManualClock::wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& condition,
                             Time deadline) const {
  if (now() < deadline) {
    condition.wait_for(lock, std::chrono::milliseconds(1));
  }
}

}  // namespace pagedlora
