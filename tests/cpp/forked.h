// What becomes of a call in a forked child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

namespace pagedlora::testing_support {

// Whether it returns true there; false as well if it throws, crashes or takes for ever.
inline bool holds_in_child(const std::function<bool()>& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    bool holds = false;
    try {
      holds = call();
    } catch (...) {
      ::_exit(2);
    }
    ::_exit(holds ? 0 : 1);  // without the end of the test program
  }
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace pagedlora::testing_support
