// The launches of lora_kernels.h for the runtime of tests: the same bodies, run on a stream's thread
// over the bytes behind the GPU's addresses.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "body/lora_expand.h"
#include "body/lora_look_up.h"
#include "body/lora_shrink.h"
#include "cuda/run_on_host.h"
#include "fake_cuda.h"
#include "pagedlora/cuda/lora_kernels.h"
#include "with_dtype.h"

namespace pagedlora::cuda {
namespace {

using testing_support::run_on_host;

template <class T>
T* behind(T* address) {
  return reinterpret_cast<T*>(fake_cuda::backing(address));
}

// The tables as they are when the kernel's turn comes, with addresses that the CPU can follow.
class HostTables {
 public:
  explicit HostTables(const LoraTablesView& view) : view_(view) {
    const std::byte* base = behind(view.base);
    LoraHeader header;
    std::memcpy(&header, base, sizeof(header));
    std::vector<LoraTile> tiles(header.num_tiles);
    if (!tiles.empty()) {
      std::memcpy(tiles.data(), base + sizeof(header), tiles.size() * sizeof(LoraTile));
    }
    view_.base = base;
    for (const LoraTile& tile : tiles) {
      auto* entry = const_cast<LoraTaskEntry*>(
          reinterpret_cast<const LoraTaskEntry*>(base + view.tasks) + tile.task);
      if (std::ranges::find(translated_, entry, &Translated::entry) == translated_.end()) {
        translated_.push_back({entry, entry->pool});
        entry->pool = behind(entry->pool);
      }
    }
  }
  ~HostTables() {
    for (const Translated& done : translated_) {
      done.entry->pool = done.pool;
    }
  }
  HostTables(const HostTables&) = delete;
  HostTables& operator=(const HostTables&) = delete;

  const LoraTablesView& view() const { return view_; }

 private:
  struct Translated {
    LoraTaskEntry* entry;
    const std::byte* pool;
  };

  LoraTablesView view_;
  std::vector<Translated> translated_;
};

}  // namespace

cudaError_t launch_lora_shrink(const LoraLaunch& launch, const ShrinkArgs& args,
                               TokensPerPass tokens, cudaStream_t stream) {
  fake_cuda::launch(stream, [launch, args, tokens] {
    const HostTables tables(launch.tables);
    with_dtype(args.dtype, [&]<class X>(X) {
      with_dtype(launch.tables.weights, [&]<class W>(W) {
        const auto run = [&]<class Body>(const Body&) {
          run_on_host(
              Body{tables.view(), launch.module.value, behind(static_cast<const X*>(args.x)),
                   args.x_row_stride, behind(launch.rank_space), launch.tables.max_blocks},
              launch.num_tiles, launch.tables.max_blocks);
        };
        tokens == TokensPerPass::one ? run(LoraShrink<X, W, 1>{}) : run(LoraShrink<X, W, 4>{});
      });
    });
  });
  return cudaSuccess;
}

cudaError_t launch_lora_look_up(const LoraLaunch& launch, const LookUpArgs& args,
                                cudaStream_t stream) {
  fake_cuda::launch(stream, [launch, args] {
    const HostTables tables(launch.tables);
    with_dtype(launch.tables.weights, [&]<class W>(W) {
      run_on_host(LoraLookUp<W>{tables.view(), launch.module.value, behind(args.token_ids),
                                args.factor, behind(launch.rank_space)},
                  launch.num_tiles, launch.tables.max_blocks);
    });
  });
  return cudaSuccess;
}

cudaError_t launch_lora_expand(const LoraLaunch& launch, const ExpandArgs& args,
                               TokensPerPass tokens, cudaStream_t stream) {
  fake_cuda::launch(stream, [launch, args, tokens] {
    const HostTables tables(launch.tables);
    with_dtype(args.dtype, [&]<class Y>(Y) {
      with_dtype(launch.tables.weights, [&]<class W>(W) {
        const auto run = [&]<class Body>(const Body&) {
          const auto* bias = static_cast<const Y*>(args.base_bias);
          run_on_host(Body{tables.view(), launch.module.value, behind(launch.rank_space),
                           behind(static_cast<Y*>(args.y)), args.y_row_stride,
                           bias == nullptr ? nullptr : behind(bias)},
                      launch.num_tiles, (args.out_features + Body::kThreads - 1) / Body::kThreads);
        };
        tokens == TokensPerPass::one ? run(LoraExpand<Y, W, 1>{}) : run(LoraExpand<Y, W, 4>{});
      });
    });
  });
  return cudaSuccess;
}

}  // namespace pagedlora::cuda
