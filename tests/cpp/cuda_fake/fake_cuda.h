// A CUDA runtime for tests, in place of libcudart: what csrc_cuda calls, over ordinary memory.
//
// A stream is a queue with a thread of its own. Copies read and write on that thread, when their
// turn comes, so that ThreadSanitizer sees who meets whom. A kernel is any function. Memory of a GPU
// lies at addresses that the CPU cannot touch: backing() says where its bytes are.
//
// What a real runtime would leave undefined, or do badly, is written down as a violation: a copy
// outside of an allocation, memory of the CPU that is not pinned (if that is forbidden), a call
// with another GPU current than the stream's, something destroyed twice, a question or a wait that
// would break off the capture of a graph on another thread.
//
// One runtime per process, as with the real one: each test begins and ends with reset().
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "pagedlora/fake/gate.h"

namespace pagedlora::fake_cuda {

// What has been made and not destroyed.
struct Live {
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t device_allocations = 0;
  std::size_t host_allocations = 0;

  friend bool operator==(const Live&, const Live&) = default;
};

// Calls of each kind since reset().
struct Counts {
  std::size_t calls = 0;  // that can be told to fail
  std::size_t polls = 0;  // for events that were not over
  std::size_t event_waits = 0;
  std::size_t single_copies = 0;
  std::size_t batches = 0;
  std::size_t copied_runs = 0;  // singly and in batches
  std::size_t copied_bytes = 0;
  std::size_t stream_waits = 0;
  std::size_t device_synchronisations = 0;
  std::size_t scatter_launches = 0;
};

// One GPU with 1 GiB, nothing held, nothing failing, counts of zero. Whatever lives is forgotten:
// a test looks at live() first.
void reset();

// The machine.
void set_num_gpus(int number);
void set_driver_version(int version);  // 0: there is no driver
void set_memory(std::size_t bytes);    // of each GPU, and what may be pinned
void refuse_batches(cudaError_t error);
void forbid_pageable_copies();

// From now on a question whether an event is over is answered when it is.
void answer_polls_late();

// Every copy passes it on its stream's thread before it moves a byte.
fake::Gate& copies();

// What follows on the stream would become part of a graph, until the capture ends. Violations then:
// to record its events, to copy on it.
void begin_capture(cudaStream_t stream);
void end_capture(cudaStream_t stream);

// Runs on the stream's thread in its turn. May pass a gate, read backing() and break_gpu().
void launch(cudaStream_t stream, std::function<void()> kernel);

// Where the bytes of memory of a GPU are. Other addresses are their own.
std::byte* backing(const void* address);

// The calls until one that fails: 0 fails the next one, once, without its effect (what destroys or
// frees does so nevertheless, as it may report an older error). An error that stays (see
// csrc_cuda/gpu_context.h) breaks the GPU instead. A poll for an event that is not over is no such
// call: how many there are is chance.
inline constexpr long kNever = -1;
void fail_call_after(long calls, cudaError_t error);
bool has_failed();  // the failure that was asked for has happened

// From now on every call fails with it. What is on streams is dropped.
void break_gpu(cudaError_t error);
bool is_broken();

// Nothing is on any stream.
bool is_idle();

Live live();
Counts counts();
std::vector<std::string> violations();

// How many threads have an error that they did not take back from the runtime.
int num_pending_errors();

// The runtime ends before its users do, as at the exit of a process.
void unload();

}  // namespace pagedlora::fake_cuda
