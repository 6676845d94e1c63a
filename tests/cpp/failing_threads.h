// Threads that cannot be started, on command: failing_threads.cc replaces pthread_create of the program
// it is linked into.
#pragma once

#include <atomic>
#include <cstdint>

namespace pagedlora::testing_support {

class FailingThreads {
 public:
  // From now on so many threads can be started, and then no more: EAGAIN, until disarm().
  static void arm(std::int64_t number) { left_ = number; }
  static void disarm() { left_ = kMany; }

  static bool may_start() { return left_-- > 0; }

 private:
  static constexpr std::int64_t kMany = std::int64_t{1} << 60;
  static inline std::atomic<std::int64_t> left_{kMany};
};

}  // namespace pagedlora::testing_support
