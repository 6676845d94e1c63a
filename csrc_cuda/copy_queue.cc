#include "copy_queue.h"

#include <vector>

namespace pagedlora::cuda {
namespace {

// Fewer copies are given one by one: a call costs a few microseconds either way.
constexpr std::size_t kMinBatch = 4;

#if CUDART_VERSION >= 12080

cudaError_t copy_batch(std::vector<void*>& targets, std::vector<void*>& sources,
                       std::vector<std::size_t>& sizes, cudaStream_t stream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(),
                              &attributes, &first, 1, stream);
#else
  std::size_t failed = 0;
  return cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(),
                              &attributes, &first, 1, &failed, stream);
#endif
}

#else

cudaError_t copy_batch(std::vector<void*>&, std::vector<void*>&, std::vector<std::size_t>&,
                       cudaStream_t) {
  return cudaErrorNotSupported;
}

#endif

}  // namespace

void CopyQueue::enqueue(std::span<const CopyRun> runs, cudaMemcpyKind kind, cudaStream_t stream) {
  if (runs.size() >= kMinBatch && has_batches_ && try_enqueue_batch(runs, stream)) {
    return;
  }
  for (const CopyRun& run : runs) {
    gpu_.check(cudaMemcpyAsync(run.target, run.source, run.bytes, kind, stream), "cudaMemcpyAsync");
  }
}

// A driver may be older than the runtime, and not know it. If it fails for another reason, so will
// the copies one by one, and say so; bytes that are copied twice are the same.
bool CopyQueue::try_enqueue_batch(std::span<const CopyRun> runs, cudaStream_t stream) {
  std::vector<void*> targets;
  std::vector<void*> sources;
  std::vector<std::size_t> sizes;
  targets.reserve(runs.size());
  sources.reserve(runs.size());
  sizes.reserve(runs.size());
  for (const CopyRun& run : runs) {
    targets.push_back(run.target);
    sources.push_back(const_cast<std::byte*>(run.source));  // 12.8 takes it so, and only reads
    sizes.push_back(run.bytes);
  }
  const cudaError_t result = copy_batch(targets, sources, sizes, stream);
  if (result == cudaErrorNotSupported || result == cudaErrorCallRequiresNewerDriver) {
    has_batches_ = false;
  }
  const bool succeeded = gpu_.succeeded(result, "cudaMemcpyBatchAsync");
  gpu_.check_alive();
  return succeeded;
}

}  // namespace pagedlora::cuda
