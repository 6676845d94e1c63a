// The launch of scatter.h for the runtime of tests: the same body, run on a stream's thread over the
// bytes behind the GPU's addresses. It can be told to fail, as other calls.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "body/scatter_rows.h"
#include "cuda/run_on_host.h"
#include "fake_runtime.h"
#include "pagedlora/cuda/scatter.h"

namespace pagedlora::cuda {
namespace {

using fake_cuda::runtime;

// What of the work the kernel reads and writes, with addresses that the CPU can follow.
class HostScatter {
 public:
  explicit HostScatter(const ScatterWork& work) : tiles_(work.num_tiles) {
    const std::scoped_lock lock(runtime().mutex);
    read(tiles_.data(), work.tiles, tiles_.size());
    std::uint32_t num_descriptors = 0;
    for (const ScatterTile& tile : tiles_) {
      num_descriptors = std::max(num_descriptors, tile.descriptor + 1);
    }
    descriptors_.resize(num_descriptors);
    read(descriptors_.data(), work.descriptors, descriptors_.size());
    for (ScatterDescriptor& descriptor : descriptors_) {
      descriptor.source = runtime().backing_of(known(descriptor.source));
      descriptor.target = runtime().backing_of(known(descriptor.target));
    }
    words_ = reinterpret_cast<std::uint32_t*>(runtime().backing_of(known(work.overflow_words)));
  }

  void run() const {
    const auto num_tiles = static_cast<std::uint32_t>(tiles_.size());
    testing_support::run_on_host(
        ScatterRows{{descriptors_.data(), tiles_.data(), num_tiles, words_}}, num_tiles, 1);
  }

 private:
  template <class Record>
  static void read(Record* into, const Record* from, std::size_t count) {
    std::memcpy(into, runtime().backing_of(known(from)), count * sizeof(Record));
  }

  template <class T>
  static T* known(T* address) {
    if (runtime().allocation_of(address, 1) == nullptr) {
      runtime().violate("a kernel reads or writes memory that the GPU does not know");
    }
    return address;
  }

  std::vector<ScatterTile> tiles_;
  std::vector<ScatterDescriptor> descriptors_;
  std::uint32_t* words_ = nullptr;
};

}  // namespace

cudaError_t launch_scatter(const ScatterWork& work, cudaStream_t stream) {
  if (work.num_tiles == 0) {
    return cudaSuccess;
  }
  const std::scoped_lock lock(runtime().mutex);
  if (const cudaError_t error = runtime().enter(); error != cudaSuccess) {
    return error;
  }
  ++runtime().counts.scatter_launches;
  runtime().push(*runtime().usable_stream(stream),
                 {[work] { HostScatter(work).run(); }, nullptr, nullptr});
  return cudaSuccess;
}

}  // namespace pagedlora::cuda
