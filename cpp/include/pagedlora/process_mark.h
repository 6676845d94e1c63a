// The process in which an object was made.
//
// A child of fork() has its parent's objects and none of its threads: nobody will finish a load, and
// a lock may be held for ever by a thread that is not there. So whoever has threads or locks keeps a
// mark, and in a child refuses its calls and leaks on destruction what cannot be destroyed: joining
// threads, destroying condition variables that others wait on, giving back space in files that the
// parent reads.
//
// Asking costs a load and a comparison, no system call: the child's side of fork() counts. vfork(),
// posix_spawn() and clone() without the C library's knowledge are not seen.
//
// Immutable.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace pagedlora {

namespace internal {
// How often this process's line of ancestors was forked since the first mark was made.
extern std::atomic<std::uint64_t> num_forks;

// Keeps a value for ever, without memory of its own.
template <class T>
void leak(T value) noexcept {
  alignas(T) std::byte storage[sizeof(T)];
  static_cast<void>(::new (static_cast<void*>(storage)) T(std::move(value)));
}
}  // namespace internal

class ProcessMark {
 public:
  ProcessMark();  // of this process

  bool is_here() const noexcept {
    return forks_ == internal::num_forks.load(std::memory_order_relaxed);
  }

  // Throws InvalidArgumentError if this is a child of the process. `what` begins the message.
  void check(const char* what) const {
    if (!is_here()) {
      refuse(what);
    }
  }

 private:
  [[noreturn]] void refuse(const char* what) const;

  std::uint64_t forks_ = 0;
  int pid_;
};

}  // namespace pagedlora
