#include "fake_runtime.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpu_context.h"

namespace pagedlora::fake_cuda {

thread_local int Runtime::current_gpu = 0;
thread_local cudaError_t Runtime::last_error = cudaSuccess;
thread_local cudaStreamCaptureMode Runtime::capture_mode = cudaStreamCaptureModeGlobal;

Runtime& Runtime::get() {
  static auto* const runtime = new Runtime;  // outlives everybody's destructors
  return *runtime;
}

void Runtime::reset() {
  copies.open();
  std::unique_lock lock(mutex);
  std::vector<Stream*> all;
  for (const auto& [stream, owner] : streams) {
    all.push_back(stream);
  }
  for (Stream* stream : all) {
    end(*stream, lock);
  }
  legacy_ = nullptr;
  events.clear();
  for (const auto& [begin, allocation] : allocations) {
    allocation.free();
  }
  allocations.clear();
  num_gpus = 1;
  driver_version = CUDART_VERSION;
  memory_bytes = std::size_t{1} << 30U;
  batch_error = cudaSuccess;
  pageable_is_forbidden = false;
  polls_are_late = false;
  calls_until_failure = kNever;
  failure_happened = false;
  broken = cudaSuccess;
  counts = {};
  violations.clear();
  current_gpu = 0;
  last_error = cudaSuccess;
  num_pending_errors = 0;
}

cudaError_t Runtime::failed(cudaError_t error) {
  num_pending_errors += last_error == cudaSuccess ? 1 : 0;
  last_error = error;
  return error;
}

cudaError_t Runtime::enter() {
  ++counts.calls;
  if (broken != cudaSuccess) {
    return failed(broken);
  }
  if (calls_until_failure == kNever || calls_until_failure-- != 0) {
    return cudaSuccess;
  }
  calls_until_failure = kNever;
  failure_happened = true;
  if (cuda::leaves_gpu_unusable(failure)) {
    broken = failure;
    changed.notify_all();
  }
  return failed(failure);
}

void Runtime::check_beside_captures() {
  if (capture_mode != cudaStreamCaptureModeRelaxed) {
    violate("a call that may break off the capture of another thread");
  }
}

Stream* Runtime::stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    if (legacy_ == nullptr) {
      auto stream = std::make_unique<Stream>();
      legacy_ = stream.get();
      streams.emplace(legacy_, std::move(stream));
      legacy_->thread = std::thread([this, stream = legacy_] { run(*stream); });
    }
    return legacy_;
  }
  const auto found = streams.find(reinterpret_cast<Stream*>(handle));
  return found == streams.end() ? nullptr : found->first;
}

void Runtime::push(Stream& stream, Step step) {
  stream.steps.push_back(std::move(step));
  if (!stream.thread.joinable()) {
    stream.thread = std::thread([this, &stream] { run(stream); });
  }
  changed.notify_all();
}

void Runtime::run(Stream& stream) {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] {
      if (stream.steps.empty()) {
        return stream.ends;
      }
      const std::shared_ptr<Mark>& after = stream.steps.front().after;
      return broken != cudaSuccess || after == nullptr || after->reached;
    });
    if (stream.steps.empty()) {
      return;
    }
    Step step = std::move(stream.steps.front());
    stream.steps.pop_front();
    stream.is_busy = true;
    if (step.run && broken == cudaSuccess) {
      lock.unlock();
      step.run();
      lock.lock();
    }
    if (step.mark != nullptr) {
      step.mark->reached = true;
    }
    stream.is_busy = false;
    changed.notify_all();
  }
}

void Runtime::wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_so) {
  changed.wait(lock, [&] { return broken != cudaSuccess || is_so(); });
}

bool Runtime::is_idle() const {
  return std::ranges::all_of(streams, [](const auto& entry) {
    return entry.first->steps.empty() && !entry.first->is_busy;
  });
}

// What is on it is done first.
void Runtime::end(Stream& stream, std::unique_lock<std::mutex>& lock) {
  stream.ends = true;
  changed.notify_all();
  lock.unlock();
  if (stream.thread.joinable()) {
    stream.thread.join();
  }
  lock.lock();
  streams.erase(&stream);
}

const Allocation* Runtime::allocation_of(const void* address, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(address);
  const auto after = allocations.upper_bound(begin);
  if (after == allocations.begin()) {
    return nullptr;
  }
  const Allocation& allocation = std::prev(after)->second;
  return begin + bytes <= allocation.begin + allocation.bytes ? &allocation : nullptr;
}

void Runtime::check_place(const void* address, std::size_t bytes, bool is_device,
                          const Stream& stream) {
  const Allocation* allocation = allocation_of(address, bytes);
  const bool is_on_gpu = allocation != nullptr && allocation->gpu >= 0;
  if (is_device && !(is_on_gpu && allocation->gpu == stream.gpu)) {
    violate("a copy to or from what is not memory of its GPU");
  }
  if (!is_device && is_on_gpu) {
    violate("a copy the wrong way");
  }
  if (!is_device && allocation == nullptr && pageable_is_forbidden) {
    violate("a copy from or to memory that is not pinned");
  }
}

bool Runtime::is_gpu_memory(const void* address) const {
  const Allocation* allocation = allocation_of(address, 1);
  return allocation != nullptr && allocation->gpu >= 0;
}

std::byte* Runtime::backing_of(const void* address) const {
  const auto* begin = static_cast<const std::byte*>(address);
  const Allocation* allocation = allocation_of(address, 1);
  return allocation == nullptr ? const_cast<std::byte*>(begin)
                               : allocation->backing + (begin - allocation->begin);
}

Stream* Runtime::usable_stream(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) {
    violate("a stream that there is not");
  } else if (stream->gpu != current_gpu) {
    violate("a stream of a GPU that is not current on the thread");
  } else if (stream->is_captured) {
    violate("a call that becomes part of a graph, or breaks off its capture");
  }
  return stream;
}

cudaError_t Runtime::push_copy(Stream& stream, void* target, const void* source, std::size_t bytes,
                               cudaMemcpyKind kind) {
  const bool to_gpu =
      kind == cudaMemcpyHostToDevice || (kind == cudaMemcpyDefault && is_gpu_memory(target));
  check_place(target, bytes, to_gpu, stream);
  check_place(source, bytes, !to_gpu, stream);
  if (!violations.empty()) {
    return failed(cudaErrorInvalidValue);
  }
  ++counts.copied_runs;
  counts.copied_bytes += bytes;
  if (to_gpu && allocation_of(source, bytes) == nullptr) {
    // Memory that is not pinned is read before the call returns, as the real runtime stages it.
    const auto* begin = static_cast<const std::byte*>(source);
    push(stream, {[this, to = backing_of(target), staged = std::vector(begin, begin + bytes)] {
                    copies.pass();
                    std::memcpy(to, staged.data(), staged.size());
                  },
                  nullptr, nullptr});
    return cudaSuccess;
  }
  push(stream, {[this, to = backing_of(target), from = backing_of(source), bytes] {
                  copies.pass();
                  std::memcpy(to, from, bytes);
                },
                nullptr, nullptr});
  return cudaSuccess;
}

}  // namespace pagedlora::fake_cuda
