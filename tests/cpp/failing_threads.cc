#include "failing_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>

using pagedlora::testing_support::FailingThreads;

// The next one in the order of look-up, which may be a sanitizer's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
  return FailingThreads::may_start() ? create(thread, attributes, start, argument) : EAGAIN;
}
