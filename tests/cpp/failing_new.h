// An operator new that fails on command: failing_new.cc replaces that of the program it is linked into.
//
// Counted are the allocations of the thread that arms it, or, in the other mode, those of all the
// other threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

namespace pagedlora::testing_support {

class FailingNew {
 public:
  enum class Who { this_thread, other_threads };

  // From now on the allocation of that number, from 0, fails, once.
  static void arm(Who who, std::int64_t number) {
    is_armed_thread_ = true;
    has_failed_ = false;
    left_ = number;
    who_ = who;
    is_armed_ = true;
  }
  static void disarm() {
    is_armed_ = false;
    is_armed_thread_ = false;
  }
  static bool has_failed() { return has_failed_; }

  static void* allocate(std::size_t bytes, std::size_t alignment) {
    if (is_armed_ && (who_ == Who::this_thread) == is_armed_thread_ && left_-- == 0) {
      has_failed_ = true;
      return nullptr;
    }
    const std::size_t rounded = (bytes + alignment) / alignment * alignment;
    return std::aligned_alloc(alignment, rounded);
  }

 private:
  static inline std::atomic<bool> is_armed_{false};
  static inline std::atomic<Who> who_{Who::this_thread};
  static inline std::atomic<bool> has_failed_{false};
  static inline std::atomic<std::int64_t> left_{0};
  static inline thread_local bool is_armed_thread_ = false;
};

}  // namespace pagedlora::testing_support
