// The scatter kernel's body: a thread block carries out one tile of one copy of a scatter plan.
//
// The bits are those of dtype.h, as the CPU executor's: equal types are copied bit for bit, others
// go through widen and narrow. Reads and writes of neighbouring threads are neighbours. Whoever
// finds that a finite value overflowed float16 stores the copy's report in its overflow word.
// Several may, each a right answer: which one stays is open, so it is a plain store of a word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "body/kernel_index.h"
#include "body/memory_access.h"
#include "pagedlora/cuda/scatter_list.h"
#include "pagedlora/dtype.h"
#include "pagedlora/host_device.h"

namespace pagedlora::cuda {

struct ScatterRows {
  static constexpr std::uint32_t kThreads = 256;
  static constexpr std::uint32_t kResidentBlocks = 5;
  static constexpr bool kLetsNextStart = false;
  static constexpr std::uint32_t kPhases = 1;
  using Shared = NoShared;
  using Thread = KernelIndex;

  ScatterWork work;

  // 16 KiB of the target, or less where elements go one by one.
  PAGEDLORA_HOST_DEVICE static constexpr std::uint32_t units_per_tile(ScatterMode mode) {
    return kThreads * (mode == ScatterMode::vectors    ? 4U
                       : mode == ScatterMode::elements ? 16U
                                                       : 2U);
  }

  PAGEDLORA_HOST_DEVICE Thread start(const KernelIndex& index) const { return index; }

  PAGEDLORA_HOST_DEVICE std::uint32_t rounds(const Thread& thread) const {
    return thread.block_x < work.num_tiles ? 1 : 0;
  }

  PAGEDLORA_HOST_DEVICE void run(std::uint32_t /*phase*/, std::uint32_t /*round*/,
                                 const Thread& thread, Shared& /*shared*/) const {
    const ScatterTile tile = work.tiles[thread.block_x];
    const ScatterDescriptor d = work.descriptors[tile.descriptor];
    bool overflowed = false;
    switch (d.source_dtype) {
      case Dtype::float32:
        overflowed = run_from<float>(d, tile.first_unit, thread.thread);
        break;
      case Dtype::float16:
        overflowed = run_from<Float16>(d, tile.first_unit, thread.thread);
        break;
      case Dtype::bfloat16:
        overflowed = run_from<Bfloat16>(d, tile.first_unit, thread.thread);
        break;
    }
    if (overflowed) {
      work.overflow_words[d.overflow_word] = d.report;
    }
  }

 private:
  template <class From>
  PAGEDLORA_HOST_DEVICE static bool run_from(const ScatterDescriptor& d, std::uint32_t first,
                                             std::uint32_t thread) {
    switch (d.target_dtype) {
      case Dtype::float32:
        return run_pair<From, float>(d, first, thread);
      case Dtype::float16:
        return run_pair<From, Float16>(d, first, thread);
      case Dtype::bfloat16:
        return run_pair<From, Bfloat16>(d, first, thread);
    }
    return false;
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE PAGEDLORA_NO_INLINE static bool run_pair(const ScatterDescriptor& d,
                                                                 std::uint32_t first,
                                                                 std::uint32_t thread) {
    switch (d.mode) {
      case ScatterMode::vectors:
        return copy_vectors<From, To>(d, first + thread);
      case ScatterMode::elements:
        return copy_elements<From, To>(d, first + thread);
      case ScatterMode::columns:
        return transpose_columns<From, To>(d, first + thread);
    }
    return false;
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE static To cast(const From& value, bool& overflowed) {
    if constexpr (std::is_same_v<From, To>) {
      return value;  // bit for bit
    } else {
      const float wide = widen(value);
      if constexpr (std::is_same_v<To, Float16>) {
        overflowed |= overflows_float16(wide);
      }
      return narrow<To>(wide);
    }
  }

  template <class From>
  PAGEDLORA_HOST_DEVICE static From load_element(const ScatterDescriptor& d,
                                                 const std::byte* from) {
    return d.source_is_aligned ? load<From>(from) : load<From, 1>(from);
  }

  // Of element `index` of the copy, counted row by row.
  template <class From>
  PAGEDLORA_HOST_DEVICE static const std::byte* source_of(const ScatterDescriptor& d,
                                                          std::uint32_t index) {
    if (d.rows == 1) {
      return d.source + std::size_t{index} * sizeof(From);
    }
    const std::uint32_t row = index / d.columns;
    return d.source + row * d.source_stride_bytes +
           std::size_t{index - row * d.columns} * sizeof(From);
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE static bool copy_vectors(const ScatterDescriptor& d, std::uint32_t first) {
    constexpr std::uint32_t kGroup = kVectorBytes / sizeof(To);
    constexpr std::uint32_t kUnits = units_per_tile(ScatterMode::vectors) / kThreads;
    const std::uint32_t elements = d.rows * d.columns;
    bool overflowed = false;
    Pack<From, kGroup> from[kUnits];
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kUnits; ++i) {  // all loads first: they wait together
      const std::uint32_t at = (first + i * kThreads) * kGroup;
      if (at < elements && elements - at >= kGroup) {
        from[i] = load<Pack<From, kGroup>>(source_of<From>(d, at));
      }
    }
    PAGEDLORA_UNROLL
    for (std::uint32_t i = 0; i < kUnits; ++i) {
      const std::uint32_t at = (first + i * kThreads) * kGroup;
      if (at < elements && elements - at >= kGroup) {
        Pack<To, kGroup> to;
        PAGEDLORA_UNROLL
        for (std::uint32_t k = 0; k < kGroup; ++k) {
          to.values[k] = cast<From, To>(from[i].values[k], overflowed);
        }
        store(d.target + std::size_t{at} * sizeof(To), to);
      } else if (at < elements) {  // the end of a run
        PAGEDLORA_NO_UNROLL
        for (std::uint32_t k = at; k < elements; ++k) {
          copy_element<From, To>(d, k, overflowed);
        }
      }
    }
    return overflowed;
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE static void copy_element(const ScatterDescriptor& d, std::uint32_t index,
                                                 bool& overflowed) {
    const From value = load_element<From>(d, source_of<From>(d, index));
    store(d.target + std::size_t{index} * sizeof(To), cast<From, To>(value, overflowed));
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE static bool copy_elements(const ScatterDescriptor& d, std::uint32_t first) {
    const std::uint32_t end = end_of(d.rows * d.columns, first, ScatterMode::elements);
    bool overflowed = false;
    PAGEDLORA_NO_UNROLL
    for (std::uint32_t index = first; index < end; index += kThreads) {
      copy_element<From, To>(d, index, overflowed);
    }
    return overflowed;
  }

  template <class From, class To>
  PAGEDLORA_HOST_DEVICE static bool transpose_columns(const ScatterDescriptor& d,
                                                      std::uint32_t first) {
    const std::uint32_t end = end_of(d.columns, first, ScatterMode::columns);
    bool overflowed = false;
    PAGEDLORA_NO_UNROLL
    for (std::uint32_t column = first; column < end; column += kThreads) {
      const std::byte* from = d.source + std::size_t{column} * sizeof(From);
      std::byte* to = d.target + std::size_t{column} * d.target_stride * sizeof(To);
      Pack<To, kMaxBlockRanks> ranks;
      PAGEDLORA_UNROLL
      for (std::uint32_t row = 0; row < kMaxBlockRanks; ++row) {
        if (row < d.rows) {
          const From value = load_element<From>(d, from + row * d.source_stride_bytes);
          ranks.values[row] = cast<From, To>(value, overflowed);
        }
      }
      if (d.rows == kMaxBlockRanks) {  // the target is a whole column of a block, and aligned
        store(to, ranks);
      } else {
        PAGEDLORA_UNROLL
        for (std::uint32_t row = 0; row < kMaxBlockRanks; ++row) {
          if (row < d.rows) {
            store(to + row * sizeof(To), ranks.values[row]);
          }
        }
      }
    }
    return overflowed;
  }

  // Where the thread that begins with unit `first` stops: after its share of the tile.
  PAGEDLORA_HOST_DEVICE static std::uint32_t end_of(std::uint32_t units, std::uint32_t first,
                                                    ScatterMode mode) {
    const std::uint32_t share = units_per_tile(mode);
    return units - first > share && first < units ? first + share : units;
  }
};

}  // namespace pagedlora::cuda
