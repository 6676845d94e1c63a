// Puts the thread into the mode in which float arithmetic flushes subnormals, for a scope.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pagedlora::testing_support {

class FlushSubnormals {
 public:
  FlushSubnormals() {
#if defined(__SSE2__)
    _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
#endif
  }
  ~FlushSubnormals() {
#if defined(__SSE2__)
    _mm_setcsr(saved_);
#endif
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  // Whether arithmetic flushes now: false where the mode cannot be set.
  bool is_active() const {
    volatile float tiny = 1e-40F;
    volatile float product = tiny * 1.0F;
    return product == 0.0F;
  }

 private:
#if defined(__SSE2__)
  static constexpr unsigned kFlushToZero = 0x8000U;
  static constexpr unsigned kDenormalsAreZero = 0x0040U;
  unsigned saved_ = _mm_getcsr();
#endif
};

}  // namespace pagedlora::testing_support
