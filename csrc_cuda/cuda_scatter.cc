#include "pagedlora/cuda/cuda_scatter.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "body/memory_access.h"
#include "gpu_buffers.h"
#include "gpu_context.h"
#include "pagedlora/cuda/scatter.h"
#include "pagedlora/errors.h"

namespace pagedlora::cuda {
namespace {

// Of one launch, each for an adapter.
constexpr std::size_t kMaxWords = 64;
constexpr std::size_t kWordsBytes = kMaxWords * sizeof(std::uint32_t);

// A descriptor per 1 KiB of staging and its tiles. The rare adapter of more pieces takes more
// launches.
constexpr std::size_t kStagingPerImage = 16;
constexpr std::size_t kMinImageBytes = 64U << 10U;

// Of one copy at most: a chunk's elements, 2 bytes each, in tiles of 512 columns.
constexpr std::size_t kMaxCopyImageBytes =
    sizeof(ScatterDescriptor) + ScatterPlan::kChunkBytes / 2 / 512 * sizeof(ScatterTile);

cudaStream_t scatter_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

std::exception_ptr overflow_of(const ScatterPlan& plan, std::uint32_t word) {
  try {
    plan.refuse_overflow(word - 1);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

struct CudaScatter::Pass {
  std::span<const Adapter> adapters;
  std::vector<Outcome> outcomes;
  void* stream;
};

CudaScatter::CudaScatter(const CudaScatterOptions& options)
    : gpu_(std::make_unique<GpuContext>(options.ordinal)),
      chunk_bytes_(std::min(options.staging_bytes, ScatterPlan::kChunkBytes)) {
  if (options.staging_bytes < ScatterPlan::kMinChunkBytes) {
    throw InvalidArgumentError("staging_bytes of CudaScatterOptions is " +
                               std::to_string(options.staging_bytes) + "; at least " +
                               std::to_string(ScatterPlan::kMinChunkBytes) + " are needed");
  }
  staging_ = std::make_unique<PinnedBuffer>(*gpu_, options.staging_bytes);
  if (options.staging == Staging::device) {
    device_staging_ = std::make_unique<DeviceBuffer>(*gpu_, options.staging_bytes);
  }
  const std::size_t image_bytes =
      kWordsBytes + std::max(kMinImageBytes, options.staging_bytes / kStagingPerImage);
  image_ = std::make_unique<PinnedBuffer>(*gpu_, image_bytes);
  device_image_ = std::make_unique<DeviceBuffer>(*gpu_, image_bytes);
}

CudaScatter::~CudaScatter() = default;

std::size_t CudaScatter::device_bytes() const {
  return device_image_->bytes() + (device_staging_ == nullptr ? 0 : device_staging_->bytes());
}

std::byte* CudaScatter::staged() const {
  return device_staging_ == nullptr ? staging_->begin() : device_staging_->begin();
}

std::vector<CudaScatter::Outcome> CudaScatter::execute(std::span<const Adapter> adapters,
                                                       void* stream) {
  gpu_->check_alive();
  const CurrentGpu current(*gpu_);
  current.check();
  check(adapters, stream);
  staged_bytes_ = 0;
  list_.clear();
  words_.clear();
  work_ = {};
  num_launches_ = 0;
  Pass pass{adapters, std::vector<Outcome>(adapters.size()), stream};
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    adapters[i].plan.list_copies(adapters[i].target.dtype, chunk_bytes_,
                                 [&](const ScatterPlan::Chunk& chunk) {
                                   if (pass.outcomes[i].error == nullptr) {
                                     add(chunk, i, pass);
                                   }
                                 });
  }
  launch(pass);
  return std::move(pass.outcomes);
}

void CudaScatter::check(std::span<const Adapter> adapters, void* stream) {
  const std::string name = "cuda:" + std::to_string(gpu_->ordinal());
  if (is_captured(*gpu_, scatter_stream(stream))) {
    throw InvalidArgumentError("a scatter on a stream of " + name +
                               " that is being captured into a graph cannot be waited for: give "
                               "another stream");
  }
  for (const Adapter& adapter : adapters) {
    if (adapter.target.layout->num_pages() == 0) {
      continue;
    }
    cudaPointerAttributes attributes{};
    gpu_->check(cudaPointerGetAttributes(&attributes, adapter.target.base),
                "cudaPointerGetAttributes");
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != gpu_->ordinal()) {
      throw InvalidArgumentError("the pages given for a scatter are not memory of " + name);
    }
  }
}

// Reads the chunk behind those that are there, and lists its copies.
void CudaScatter::add(const ScatterPlan::Chunk& chunk, std::size_t adapter, Pass& pass) {
  std::size_t begin = (staged_bytes_ + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  if (begin + chunk.bytes > staging_->bytes()) {
    launch(pass);
    begin = 0;
  }
  const Adapter& of = pass.adapters[adapter];
  Outcome& outcome = pass.outcomes[adapter];
  try {
    of.reader.read(chunk.offset, {staging_->begin() + begin, chunk.bytes});
  } catch (...) {
    outcome.error = std::current_exception();
    return;
  }
  outcome.source_bytes += chunk.bytes;
  staged_bytes_ = begin + chunk.bytes;
  for (const ScatterCopy& copy : chunk.copies) {
    if (!has_room_for_copy_of(adapter)) {
      launch(pass);  // the chunk stays where it is, for the rest of its copies
    }
    if (words_.empty() || words_.back() != adapter) {
      words_.push_back(adapter);
    }
    list_.add({&copy, 1}, staged() + begin, of.target,
              static_cast<std::uint32_t>(words_.size() - 1));
  }
}

bool CudaScatter::has_room_for_copy_of(std::size_t adapter) const {
  const bool has_word = words_.size() < kMaxWords || words_.back() == adapter;
  return has_word && kWordsBytes + list_.image_bytes() + kMaxCopyImageBytes <= image_->bytes();
}

// Carries out what is listed, and waits until that is done.
void CudaScatter::launch(Pass& pass) {
  if (list_.empty()) {
    return;
  }
  try {
    enqueue(pass.stream);
    gpu_->check(cudaStreamSynchronize(scatter_stream(pass.stream)), "cudaStreamSynchronize");
  } catch (...) {
    drain(pass.stream);
    throw;
  }
  for (std::size_t i = 0; i < words_.size(); ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, image_->begin() + i * sizeof(word), sizeof(word));
    std::exception_ptr& error = pass.outcomes[words_[i]].error;
    if (word != 0 && error == nullptr) {
      error = overflow_of(pass.adapters[words_[i]].plan, word);
    }
  }
  list_.clear();
  words_.clear();
}

void CudaScatter::enqueue(void* stream) {
  const auto upload = [&](const DeviceBuffer& to, const PinnedBuffer& from, std::size_t bytes) {
    gpu_->check(cudaMemcpyAsync(to.begin(), from.begin(), bytes, cudaMemcpyHostToDevice,
                                scatter_stream(stream)),
                "cudaMemcpyAsync");
  };
  std::memset(image_->begin(), 0, kWordsBytes);
  list_.write_image(image_->begin() + kWordsBytes);
  auto* words = reinterpret_cast<std::uint32_t*>(device_image_->begin());
  work_ = list_.work_of(device_image_->begin() + kWordsBytes, words);
  upload(*device_image_, *image_, kWordsBytes + list_.image_bytes());
  if (device_staging_ != nullptr) {
    upload(*device_staging_, *staging_, staged_bytes_);
  }
  gpu_->check(launch_scatter(work_, scatter_stream(stream)), "scatter");
  ++num_launches_;
  gpu_->check(cudaMemcpyAsync(image_->begin(), words, words_.size() * sizeof(std::uint32_t),
                              cudaMemcpyDeviceToHost, scatter_stream(stream)),
              "cudaMemcpyAsync");
}

// After a failure.
void CudaScatter::drain(void* stream) noexcept {
  const cudaError_t result = cudaStreamSynchronize(scatter_stream(stream));
  if (!gpu_->succeeded(result, "cudaStreamSynchronize")) {
    gpu_->die(result, "cudaStreamSynchronize");  // nobody knows what is still written
  }
  work_ = {};
}

void CudaScatter::repeat(void* stream) {
  gpu_->check_alive();
  const CurrentGpu current(*gpu_);
  current.check();
  gpu_->check(launch_scatter(work_, scatter_stream(stream)), "scatter");
}

}  // namespace pagedlora::cuda
