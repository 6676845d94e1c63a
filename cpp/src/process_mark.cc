#include "pagedlora/process_mark.h"

#include <pthread.h>
#include <unistd.h>

#include <string>

#include "pagedlora/errors.h"

namespace pagedlora {
namespace internal {

std::atomic<std::uint64_t> num_forks{0};

}  // namespace internal

namespace {

void count_fork() { internal::num_forks.fetch_add(1, std::memory_order_relaxed); }

// Without memory for the handler no fork is ever seen: then as without marks.
bool see_forks() { return ::pthread_atfork(nullptr, nullptr, &count_fork) == 0; }

}  // namespace

ProcessMark::ProcessMark() : pid_(::getpid()) {
  [[maybe_unused]] static const bool sees_forks = see_forks();
  forks_ = internal::num_forks.load(std::memory_order_relaxed);
}

void ProcessMark::refuse(const char* what) const {
  throw InvalidArgumentError(std::string(what) + " was made in another process (pid " +
                             std::to_string(pid_) +
                             "), whose threads and locks a forked child does not have: create it "
                             "after the fork, or start workers with \"spawn\"");
}

}  // namespace pagedlora
