// The runtime's functions for streams, events and copies, as csrc_cuda calls them.
#include <cstring>
#include <memory>
#include <utility>

#include "fake_runtime.h"

using pagedlora::fake_cuda::Event;
using pagedlora::fake_cuda::Mark;
using pagedlora::fake_cuda::runtime;
using pagedlora::fake_cuda::Runtime;
using pagedlora::fake_cuda::Stream;
using Lock = std::unique_lock<std::mutex>;

namespace {

Event* event_of(cudaEvent_t handle) {
  const auto found = runtime().events.find(reinterpret_cast<Event*>(handle));
  if (found == runtime().events.end()) {
    runtime().violate("an event that there is not");
    return nullptr;
  }
  return found->first;
}

// After a wait: an error of the GPU ends it early.
cudaError_t outcome() {
  return runtime().broken != cudaSuccess ? runtime().failed(runtime().broken) : cudaSuccess;
}

}  // namespace

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, Runtime::capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  const Stream* stream = runtime().stream_of(handle);
  if (stream == nullptr) {
    return runtime().failed(cudaErrorInvalidResourceHandle);
  }
  *status = stream->is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned int flags) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (flags != cudaStreamNonBlocking) {
    runtime().violate("a stream that waits for the default stream");
  }
  auto stream = std::make_unique<Stream>();
  stream->gpu = Runtime::current_gpu;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  runtime().streams.emplace(stream.get(), std::move(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock(runtime().mutex);
  const cudaError_t error = runtime().enter();
  Stream* stream = runtime().stream_of(handle);
  if (stream == nullptr) {
    runtime().violate("a stream is destroyed twice");
    return runtime().failed(cudaErrorInvalidResourceHandle);
  }
  runtime().end(*stream, lock);
  return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock(runtime().mutex);
  runtime().check_beside_captures();
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  const Stream* stream = runtime().usable_stream(handle);
  runtime().wait_for(lock, [&] { return stream->steps.empty() && !stream->is_busy; });
  return outcome();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned int) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  Stream* stream = runtime().usable_stream(handle);
  const Event* event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) {
    return runtime().failed(cudaErrorInvalidResourceHandle);
  }
  ++runtime().counts.stream_waits;
  runtime().push(*stream, {{}, event->last, nullptr});
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  ++runtime().counts.device_synchronisations;
  runtime().wait_for(lock, [] { return runtime().is_idle(); });
  return outcome();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned int flags) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if ((flags & cudaEventDisableTiming) == 0U) {
    runtime().violate("an event that takes times");
  }
  auto event = std::make_unique<Event>();
  event->gpu = Runtime::current_gpu;
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  runtime().events.emplace(event.get(), std::move(event));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Lock lock(runtime().mutex);
  const cudaError_t error = runtime().enter();
  if (const Event* event = event_of(handle)) {
    runtime().events.erase(const_cast<Event*>(event));
  }
  return error;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  Stream* stream = runtime().usable_stream(stream_handle);
  Event* event = event_of(handle);
  if (stream == nullptr || event == nullptr || stream->gpu != event->gpu) {
    return runtime().failed(cudaErrorInvalidResourceHandle);
  }
  event->last = std::make_shared<Mark>();
  runtime().push(*stream, {{}, nullptr, event->last});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock(runtime().mutex);
  runtime().check_beside_captures();
  const Event* event = event_of(handle);
  const std::shared_ptr<Mark> mark = event == nullptr ? nullptr : event->last;
  const auto is_over = [&] { return mark == nullptr || mark->reached; };
  if (runtime().polls_are_late) {
    runtime().wait_for(lock, is_over);
  }
  if (!is_over() && runtime().broken == cudaSuccess) {
    ++runtime().counts.polls;
    return runtime().failed(cudaErrorNotReady);
  }
  return runtime().enter();
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock(runtime().mutex);
  runtime().check_beside_captures();
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  ++runtime().counts.event_waits;
  const Event* event = event_of(handle);
  const std::shared_ptr<Mark> mark = event == nullptr ? nullptr : event->last;
  runtime().wait_for(lock, [&] { return mark == nullptr || mark->reached; });
  return outcome();
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  ++runtime().counts.single_copies;
  Stream* stream = runtime().usable_stream(handle);
  return runtime().push_copy(*stream, target, source, bytes, kind);
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t bytes, cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  Stream* stream = runtime().usable_stream(handle);
  if (stream == nullptr || runtime().allocation_of(target, bytes) == nullptr) {
    runtime().violate("memory is set that was not allocated so");
    return runtime().failed(cudaErrorInvalidValue);
  }
  runtime().push(*stream, {[to = runtime().backing_of(target), value, bytes] {
                             std::memset(to, value, bytes);
                           },
                           nullptr, nullptr});
  return cudaSuccess;
}

#if CUDART_VERSION >= 12080

namespace {

template <class Target, class Source>
cudaError_t copy_batch(Target targets, Source sources, const std::size_t* sizes, std::size_t count,
                       cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  if (runtime().batch_error != cudaSuccess) {
    return runtime().failed(runtime().batch_error);
  }
  if (handle == nullptr || handle == cudaStreamLegacy) {
    runtime().violate("a batch of copies on the default stream");
  }
  ++runtime().counts.batches;
  Stream* stream = runtime().usable_stream(handle);
  for (std::size_t i = count; i-- > 0;) {  // in no order that anybody may rely on
    if (sizes[i] == 0) {
      runtime().violate("an empty copy in a batch");
    }
    const cudaError_t error =
        runtime().push_copy(*stream, targets[i], sources[i], sizes[i], cudaMemcpyDefault);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

#if CUDART_VERSION >= 13000

cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources,
                                 const std::size_t* sizes, std::size_t count,
                                 cudaMemcpyAttributes* /*attributes*/, std::size_t* /*indices*/,
                                 std::size_t /*num_attributes*/, cudaStream_t stream) {
  return copy_batch(targets, sources, sizes, count, stream);
}

#else

cudaError_t cudaMemcpyBatchAsync(void** targets, void** sources, std::size_t* sizes,
                                 std::size_t count, cudaMemcpyAttributes* /*attributes*/,
                                 std::size_t* /*indices*/, std::size_t /*num_attributes*/,
                                 std::size_t* /*failed*/, cudaStream_t stream) {
  return copy_batch(targets, sources, sizes, count, stream);
}

#endif
#endif
