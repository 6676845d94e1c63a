// Adapters of any shapes, types and slices with the plans that fill their pages, and what the CPU's
// executor makes of them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "all_dtypes.h"
#include "cuda/run_on_host.h"
#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/scatter_plan.h"
#include "random_seeds.h"

namespace pagedlora::testing_support {

inline constexpr std::size_t kScatterPageBytes = 4096;

// Memory aligned like an arena, at the given distance from that.
class ArenaBytes {
 public:
  explicit ArenaBytes(std::size_t size, std::size_t shift = 0)
      : shift_(shift),
        size_(size),
        memory_(static_cast<std::byte*>(
            ::operator new(size + shift + 1, std::align_val_t{kScatterPageBytes}))) {
    std::memset(memory_.get(), 0xFF, size + shift);
  }
  std::byte* data() { return memory_.get() + shift_; }
  std::vector<std::byte> copy() const {
    return {memory_.get() + shift_, memory_.get() + shift_ + size_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{kScatterPageBytes});
    }
  };
  std::size_t shift_;
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

// An adapter in a source: every tensor somewhere in a larger one, of any type and any bits.
class RandomScatter {
 public:
  // With `small_modules`: so many, of a few features.
  RandomScatter(Dtype cache_dtype, bool is_aligned, Rng& rng, std::uint32_t small_modules = 0)
      : cache_dtype_(cache_dtype) {
    if (!is_aligned) {
      bytes_.resize(pick(rng, 0, 15));
    }
    std::vector<LoraModule> modules;
    std::vector<PlannedRow> rows;
    const std::uint32_t count = small_modules != 0 ? small_modules : pick(rng, 1, 3);
    for (std::uint32_t i = 0; i < count; ++i) {
      modules.push_back(small_modules != 0 ? small_module(i, rng) : module(i, rng));
      const auto out = static_cast<std::uint32_t>(modules.back().out_features);
      const std::uint32_t cut = pick(rng, 1, out - 1);
      add_row(rows, {i}, modules.back(), {0, cut}, rng);
      add_row(rows, {i}, modules.back(), {cut, out - cut}, rng);
    }
    config_ = std::make_unique<LoraModelConfig>(modules, cache_dtype, LoraModelConfig::kMaxRank);
    source = std::make_shared<FakeSource>(bytes_);
    plan = std::make_unique<AdapterPlan>(*config_, rows, source);
    const std::size_t max_part = pick(rng, 0, 1) == 0 ? 0 : 32 * pick(rng, 1, 128);
    layout = std::make_unique<Layout>(
        *config_, plan->row_shapes(),
        LayoutParams{kScatterPageBytes, element_bytes(cache_dtype), max_part});
    scatter = std::make_unique<ScatterPlan>(*config_, *plan, *layout);
    for (const std::uint32_t page : testing_support::all_of(layout->num_pages())) {
      pages_.push_back(PageId{page});
    }
    std::shuffle(pages_.begin(), pages_.end(), rng);
  }

  TaskPages view(ArenaBytes& pool) const { return view_at(pool.data()); }
  TaskPages view_at(std::byte* pool) const {
    return {layout.get(), pages_.data(),     plan->scales().data(),
            pool,         kScatterPageBytes, cache_dtype_};
  }
  std::size_t pool_bytes() const { return layout->num_pages() * kScatterPageBytes; }

  std::shared_ptr<FakeSource> source;
  std::unique_ptr<AdapterPlan> plan;
  std::unique_ptr<Layout> layout;
  std::unique_ptr<ScatterPlan> scatter;

 private:
  static LoraModule module(std::uint32_t index, Rng& rng) {
    const bool is_wide = pick(rng, 0, 4) == 0;
    const bool is_embedding = pick(rng, 0, 2) == 0;
    const std::uint32_t in = is_wide ? pick(rng, 2'000, 9'000) : 8 * pick(rng, 1, 40);
    const std::uint32_t out = pick(rng, 0, 1) == 0 ? pick(rng, 2, 300) : 16 * pick(rng, 1, 60);
    return {"module." + std::to_string(index),
            -1,
            -1,
            in,
            out,
            is_embedding ? ModuleKind::embedding : ModuleKind::linear};
  }

  static LoraModule small_module(std::uint32_t index, Rng& rng) {
    const std::uint32_t in = pick(rng, 4, 16);
    return {"module." + std::to_string(index), -1, -1, in, pick(rng, 2, 4)};
  }

  void add_row(std::vector<PlannedRow>& rows, ModuleIndex module, const LoraModule& shape,
               FeatureRange out, Rng& rng) {
    const auto in = static_cast<std::uint32_t>(shape.in_features);
    const std::uint32_t begin = pick(rng, 0, 1) == 0 ? 0 : pick(rng, 0, in - 1);
    const FeatureRange inputs{begin, pick(rng, 0, 1) == 0 ? in - begin : pick(rng, 1, in - begin)};
    PlannedRow row{module, pick(rng, 0, 1) == 0 ? 8 * pick(rng, 1, 3) : pick(rng, 1, 20), {}, {}};
    row.in = inputs;
    row.out = out;
    row.a = matrix(row.rank, inputs.length, rng);
    row.b = matrix(out.length, row.rank, rng);
    if (pick(rng, 0, 2) == 0) {
      const PlannedMatrix bias = matrix(1, out.length, rng);
      row.bias = {bias.offset, bias.dtype};
    }
    if (pick(rng, 0, 2) == 0) {
      row.dora_scale = {put(out.length, Dtype::float32, rng), Dtype::float32};
    }
    rows.push_back(row);
  }

  // A slice, now and then of a larger matrix.
  PlannedMatrix matrix(std::uint32_t height, std::uint32_t width, Rng& rng) {
    const Dtype dtype = kDtypes[pick(rng, 0, 2)];
    const bool is_slice = pick(rng, 0, 1) == 0;
    const std::uint32_t columns = width + (is_slice ? pick(rng, 0, 2) * 8 + pick(rng, 0, 1) : 0);
    const std::uint32_t first = pick(rng, 0, columns - width);
    const std::uint64_t offset = put(std::size_t{height} * columns, dtype, rng);
    return {offset + first * element_bytes(dtype), dtype, columns};
  }

  std::uint64_t put(std::size_t elements, Dtype dtype, Rng& rng) {
    const std::uint64_t offset = bytes_.size();
    bytes_.resize(offset + elements * element_bytes(dtype));
    for (std::uint64_t at = offset; at < bytes_.size(); at += element_bytes(dtype)) {
      do {
        const auto bits =
            static_cast<std::uint32_t>(rng());  // subnormals, NaN and infinity among them
        std::memcpy(bytes_.data() + at, &bits, element_bytes(dtype));
      } while (cache_dtype_ == Dtype::float16 &&
               overflows_float16(load(bytes_.data() + at, dtype)));
    }
    return offset;
  }

  Dtype cache_dtype_;
  std::vector<std::byte> bytes_;
  std::unique_ptr<LoraModelConfig> config_;
  std::vector<PageId> pages_;
};

inline std::vector<std::byte> filled_by_cpu(const RandomScatter& adapter, Dtype dtype) {
  ArenaBytes pool(adapter.pool_bytes());
  std::vector<std::byte> chunk(ScatterPlan::kChunkBytes);
  adapter.scatter->execute(*adapter.source->open(), dtype, chunk, adapter.view(pool), nullptr);
  return pool.copy();
}

}  // namespace pagedlora::testing_support
