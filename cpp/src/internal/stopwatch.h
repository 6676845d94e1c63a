// Adds the time of its own life to a counter of seconds.
#pragma once

#include <chrono>

namespace pagedlora::internal {

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    seconds_ += elapsed.count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace pagedlora::internal
