// Holds threads back until somebody lets them go: to make anything late, or late for ever.
//
// Thread-safe. Passages are numbered from 0 in the order in which they are begun.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <set>

namespace pagedlora::fake {

class Gate {
 public:
  void close() { set_open(false); }
  void open() { set_open(true); }

  // Lets one passage go, begun or not, while the gate stays closed.
  void let_pass(std::size_t number) {
    const std::scoped_lock lock(mutex_);
    let_through_.insert(number);
    changed_.notify_all();
  }

  // Returns when the gate is open or lets this passage go.
  void pass() {
    std::unique_lock lock(mutex_);
    const std::size_t number = num_begun_++;
    changed_.notify_all();
    changed_.wait(lock, [&] { return is_open_ || let_through_.contains(number); });
    ++num_passed_;
  }

  std::size_t num_begun() const {
    const std::scoped_lock lock(mutex_);
    return num_begun_;
  }
  std::size_t num_waiting() const {
    const std::scoped_lock lock(mutex_);
    return num_begun_ - num_passed_;
  }

  // Waits until so many passages have begun.
  void wait_for_begun(std::size_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_begun_ >= number; });
  }

 private:
  void set_open(bool open) {
    const std::scoped_lock lock(mutex_);
    is_open_ = open;
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = true;
  std::set<std::size_t> let_through_;
  std::size_t num_begun_ = 0;
  std::size_t num_passed_ = 0;
};

}  // namespace pagedlora::fake
