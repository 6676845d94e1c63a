// What a kernel body is, and how its threads are numbered.
//
// A body is a struct of arguments whose member functions g++ compiles too. It has
//   kThreads                 threads per thread block
//   kLetsNextStart           whether kernels that may start early can do so while this one runs: they
//                            read weights and tables, so not if it writes those
//   kResidentBlocks          thread blocks that a multiprocessor shall have room for: it limits registers
//   kPhases                  steps of one round; all threads of a block end one before the next begins
//   Shared                   memory of one thread block; content unspecified at first
//   Thread, start(index)     what a thread finds out once, and keeps
//   rounds(thread)           how often the phases are repeated; the same for all threads of a block
//   run(phase, round, thread, shared)
// A body that may start early (launch_body) calls wait_for_stream() before a thread touches anything
// that an earlier kernel writes, or reads while this one would write it.
// On the device run_body.cuh launches it, with a barrier after each phase. On the host, nested loops
// do the same (tests/cpp/cuda/run_on_host.h); since threads of one phase meet only at its end, the
// order of the loop over threads changes nothing, and the host gives the device's bits: sums are in
// a fixed order, and products are fused with additions only where a body says so (multiply_add).
#pragma once

#include <cstdint>
#include <functional>

#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

struct KernelIndex {
  std::uint32_t block_x = 0;
  std::uint32_t block_y = 0;
  std::uint32_t thread = 0;
};

// Of bodies whose threads share nothing.
struct NoShared {};

// a * b + c, rounded once.
PAGEDLORA_HOST_DEVICE inline float multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

#if !defined(__CUDACC__)
// What tests do when a thread waits.
inline thread_local const std::function<void()>* host_wait = nullptr;
#endif

// Until all that was launched on the stream before has ended and can be read. Costs next to nothing
// the second time, or in a kernel that did not start early.
PAGEDLORA_HOST_DEVICE inline void wait_for_stream() {
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#elif !defined(__CUDACC__)
  if (host_wait != nullptr) {
    (*host_wait)();
  }
#endif
}

}  // namespace pagedlora::cuda
