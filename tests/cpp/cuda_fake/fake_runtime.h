// The state behind fake_cuda.h and the runtime's functions. Everything is guarded by one mutex,
// which is not held while anything is copied or runs.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"

namespace pagedlora::fake_cuda {

// A moment on a stream that others can wait for.
struct Mark {
  bool reached = false;
};

struct Step {
  std::function<void()> run;    // without the mutex; may be empty
  std::shared_ptr<Mark> after;  // must be reached before; may be null
  std::shared_ptr<Mark> mark;   // is reached after; may be null
};

struct Stream {
  int gpu = 0;
  std::deque<Step> steps;
  bool is_busy = false;
  bool is_captured = false;
  bool ends = false;
  std::thread thread;
};

struct Event {
  int gpu = 0;
  std::shared_ptr<Mark> last;  // null: never recorded
};

// Memory of a GPU: reserved addresses and, elsewhere, its bytes. Of the CPU: one and the same.
struct Allocation {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  int gpu = -1;  // -1: pinned memory of the CPU
  std::byte* backing = nullptr;
  std::function<void()> free;
};

class Runtime {
 public:
  static Runtime& get();

  void reset();

  // What follows is called with the mutex.

  // Begins a call. cudaSuccess: it may go on.
  cudaError_t enter();
  cudaError_t failed(cudaError_t error);  // notes it as this thread's
  void check_beside_captures();           // for calls that could break off another thread's capture
  void violate(const std::string& what) { violations.push_back(what); }

  Stream* stream_of(cudaStream_t handle);  // nullptr: unknown
  std::size_t num_made_streams() const { return streams.size() - (legacy_ != nullptr ? 1U : 0U); }
  void push(Stream& stream, Step step);
  void wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_so);
  bool is_idle() const;
  void end(Stream& stream, std::unique_lock<std::mutex>& lock);
  const Allocation* allocation_of(const void* address, std::size_t bytes) const;

  // The address of its bytes: another one for memory of a GPU.
  std::byte* backing_of(const void* address) const;
  cudaError_t push_copy(Stream& stream, void* target, const void* source, std::size_t bytes,
                        cudaMemcpyKind kind);
  // A stream that may be used now; nullptr and a violation otherwise.
  Stream* usable_stream(cudaStream_t handle);

  std::mutex mutex;
  std::condition_variable changed;
  fake::Gate copies;

  int num_gpus = 1;
  int driver_version = CUDART_VERSION;
  std::size_t memory_bytes = std::size_t{1} << 30U;
  cudaError_t batch_error = cudaSuccess;
  bool pageable_is_forbidden = false;
  bool polls_are_late = false;

  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<const std::byte*, Allocation> allocations;  // by address

  long calls_until_failure = kNever;
  cudaError_t failure = cudaSuccess;
  bool failure_happened = false;
  cudaError_t broken = cudaSuccess;
  Counts counts;
  std::vector<std::string> violations;

  static thread_local int current_gpu;
  static thread_local cudaError_t last_error;
  static thread_local cudaStreamCaptureMode capture_mode;
  std::atomic<int> num_pending_errors{0};

 private:
  void run(Stream& stream);
  void check_place(const void* address, std::size_t bytes, bool is_device, const Stream& stream);
  bool is_gpu_memory(const void* address) const;

  Stream* legacy_ = nullptr;
};

inline Runtime& runtime() { return Runtime::get(); }

}  // namespace pagedlora::fake_cuda
