// What tests tell the runtime and ask it (fake_cuda.h).
#include <utility>

#include "fake_runtime.h"

namespace pagedlora::fake_cuda {
namespace {

template <class Value>
void set(Value Runtime::* field, Value value) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().*field = value;
}

}  // namespace

void reset() { runtime().reset(); }

void set_num_gpus(int number) { set(&Runtime::num_gpus, number); }
void set_driver_version(int version) { set(&Runtime::driver_version, version); }
void set_memory(std::size_t bytes) { set(&Runtime::memory_bytes, bytes); }
void refuse_batches(cudaError_t error) { set(&Runtime::batch_error, error); }
void forbid_pageable_copies() { set(&Runtime::pageable_is_forbidden, true); }
void answer_polls_late() { set(&Runtime::polls_are_late, true); }

fake::Gate& copies() { return runtime().copies; }

void begin_capture(cudaStream_t stream) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().stream_of(stream)->is_captured = true;
}

void end_capture(cudaStream_t stream) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().stream_of(stream)->is_captured = false;
}

void launch(cudaStream_t stream, std::function<void()> kernel) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().push(*runtime().stream_of(stream), {std::move(kernel), nullptr, nullptr});
}

std::byte* backing(const void* address) {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().backing_of(address);
}

void fail_call_after(long calls, cudaError_t error) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().calls_until_failure = calls;
  runtime().failure = error;
  runtime().failure_happened = false;
}

bool has_failed() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().failure_happened;
}

void break_gpu(cudaError_t error) {
  const std::scoped_lock lock(runtime().mutex);
  runtime().broken = error;
  runtime().changed.notify_all();
}

bool is_broken() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().broken != cudaSuccess;
}

bool is_idle() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().is_idle();
}

Live live() {
  const std::scoped_lock lock(runtime().mutex);
  Live found;
  found.streams = runtime().num_made_streams();
  found.events = runtime().events.size();
  for (const auto& [begin, allocation] : runtime().allocations) {
    ++(allocation.gpu >= 0 ? found.device_allocations : found.host_allocations);
  }
  return found;
}

Counts counts() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().counts;
}

std::vector<std::string> violations() {
  const std::scoped_lock lock(runtime().mutex);
  return runtime().violations;
}

int num_pending_errors() { return runtime().num_pending_errors; }

void unload() { break_gpu(cudaErrorCudartUnloading); }

}  // namespace pagedlora::fake_cuda
