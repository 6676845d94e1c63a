// Reads adapters and fills their pages on a GPU by the scatter kernel: the owner of what the kernel
// needs. The bits are those of ScatterPlan::execute().
//
// For an engine with a device tier alone, or where weights come faster than the CPU converts them.
// PeftCacheManager does without: its host tier holds converted pages, and copies them as they are
// (docs/adr/0019).
//
// Sources are read into pinned memory of a fixed size. When it is full, or all is read, one launch
// scatters what is there, of however many adapters: straight out of that memory, over the bus, or out
// of a buffer on the GPU that it is uploaded to by one copy. Reading does not overlap with either.
//
// Thread-compatible; the GPU may be used by others meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "pagedlora/cuda/scatter_list.h"
#include "pagedlora/layout.h"
#include "pagedlora/scatter_plan.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora::cuda {

class DeviceBuffer;
class GpuContext;
class PinnedBuffer;

// Where kernels read what sources hold.
enum class Staging : std::uint8_t {
  pinned,  // memory of the host
  device,  // of the GPU: as much again, there
};

struct CudaScatterOptions {
  std::size_t staging_bytes = std::size_t{64} << 20U;  // at least ScatterPlan::kMinChunkBytes
  Staging staging = Staging::device;
  int ordinal = 0;  // the GPU
};

class CudaScatter {
 public:
  struct Adapter {
    const ScatterPlan& plan;
    SourceReader& reader;  // finish() is left to the caller
    TaskPages target;      // on the GPU; claimed, and nobody reads or writes them meanwhile
  };

  struct Outcome {
    // What the reader threw, or AdapterFormatError for a finite value that float16 cannot hold: the
    // target is then partly written.
    std::exception_ptr error;
    std::uint64_t source_bytes = 0;  // that were read
  };

  // Throws GpuUnavailableError, GpuCallError (no memory, for one), or InvalidArgumentError for too
  // small a staging.
  explicit CudaScatter(const CudaScatterOptions& options);
  ~CudaScatter();
  CudaScatter(const CudaScatter&) = delete;
  CudaScatter& operator=(const CudaScatter&) = delete;

  // Fills the targets, and returns when they are filled: an outcome per adapter, in their order. May
  // block. Goes in the order of `stream`, and waits for it. Throws InvalidArgumentError, with nothing
  // written, for pages that are not memory of the GPU or a stream that is being captured; and
  // GpuUnavailableError or GpuCallError, with all targets in an unspecified state. Nothing writes them
  // any more when it returns or throws.
  std::vector<Outcome> execute(std::span<const Adapter> adapters, void* stream);

  // Enqueues the last launch of the last execute() once more, and does not wait: to measure it. The
  // targets are written again. Does nothing if there was no launch.
  void repeat(void* stream);

  // Of the last execute().
  std::size_t num_launches() const { return num_launches_; }

  // Bytes on the GPU.
  std::size_t device_bytes() const;

 private:
  struct Pass;

  void check(std::span<const Adapter> adapters, void* stream);
  void add(const ScatterPlan::Chunk& chunk, std::size_t adapter, Pass& pass);
  bool has_room_for_copy_of(std::size_t adapter) const;
  void launch(Pass& pass);
  void enqueue(void* stream);
  void drain(void* stream) noexcept;
  std::byte* staged() const;  // as kernels find it

  std::unique_ptr<GpuContext> gpu_;
  std::unique_ptr<PinnedBuffer> staging_;
  std::unique_ptr<DeviceBuffer> device_staging_;  // null: kernels read the pinned one
  // Overflow words, and then what ScatterList writes.
  std::unique_ptr<PinnedBuffer> image_;
  std::unique_ptr<DeviceBuffer> device_image_;
  std::size_t chunk_bytes_;

  // The next launch.
  std::size_t staged_bytes_ = 0;
  ScatterList list_;
  std::vector<std::size_t> words_;  // the adapter of each overflow word
  ScatterWork work_;                // of the last one
  std::size_t num_launches_ = 0;
};

}  // namespace pagedlora::cuda
