// Adapters in pages, and batches of activations, for the tests of LoraOperator.
//
// Everything that is not a weight or an activation (gaps in pages, padding between rows) is NaN,
// so that whoever reads it is noticed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "pagedlora/lora_operator.h"

namespace pagedlora::testing_support {

// The only one of most configurations.
inline constexpr ModuleIndex kModule{0};

inline float load(const std::byte* at, Dtype dtype) {
  const auto as = [at]<class T>(T value) {
    std::memcpy(&value, at, sizeof(T));
    return widen(value);
  };
  return dtype == Dtype::float32   ? as(float{})
         : dtype == Dtype::float16 ? as(Float16{})
                                   : as(Bfloat16{});
}

inline void store(std::byte* at, Dtype dtype, float value) {
  const auto as = [at](auto narrowed) { std::memcpy(at, &narrowed, sizeof(narrowed)); };
  dtype == Dtype::float32   ? as(value)
  : dtype == Dtype::float16 ? as(narrow<Float16>(value))
                            : as(narrow<Bfloat16>(value));
}

// The largest relative error of one rounding to the type.
inline double unit_roundoff(Dtype dtype) {
  return dtype == Dtype::float32 ? 0x1p-24 : dtype == Dtype::float16 ? 0x1p-11 : 0x1p-8;
}

using Rng = std::mt19937;

inline float uniform(Rng& rng) { return std::uniform_real_distribution<float>(-1, 1)(rng); }

// Both ends included.
inline std::uint32_t pick(Rng& rng, std::uint32_t low, std::uint32_t high) {
  return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
}

inline LoraModelConfig config_of(std::vector<std::pair<std::uint32_t, std::uint32_t>> in_out) {
  std::vector<LoraModule> modules;
  for (const auto& [in, out] : in_out) {
    modules.push_back({"module." + std::to_string(modules.size()), -1, -1, in, out});
  }
  return {std::move(modules), Dtype::float32, LoraModelConfig::kMaxRank};
}

// One resident adapter: its layout, its pages in a pool of its own, and a copy of its weights.
class Adapter {
 public:
  Adapter(const LoraModelConfig& config, std::vector<RowShape> shapes, Dtype dtype,
          std::size_t max_part_bytes, Rng& rng)
      : dtype_(dtype),
        page_bytes_(page_bytes_for(config, dtype)),
        layout_(config, std::move(shapes), {page_bytes_, element_bytes(dtype), max_part_bytes}),
        pool_(layout_.num_pages() * page_bytes_, std::byte{0xFF}),
        pages_(layout_.num_pages()) {
    for (std::uint32_t page = 0; page < pages_.size(); ++page) {
      pages_[page] = PageId{page};
    }
    std::shuffle(pages_.begin(), pages_.end(), rng);
    for (std::size_t row = 0; row < layout_.rows().size(); ++row) {
      scales.push_back(1.5F + uniform(rng));
      fill(static_cast<std::uint32_t>(row), rng);
    }
  }

  TaskPages pages() {
    return {&layout_, pages_.data(), scales.data(), pool_.data(), page_bytes_, dtype_};
  }
  const Layout& layout() const { return layout_; }

  struct Row {
    std::uint32_t in;
    std::uint32_t out;
    std::uint32_t rank;
    std::vector<float> a;  // [rank, in]
    std::vector<float> b;  // [out, rank]
    std::uint32_t in_offset = 0;
    std::uint32_t out_offset = 0;
    std::vector<float> bias = {};        // [out], or empty
    std::vector<float> dora_scale = {};  // [out], or empty
  };

  std::vector<Row> rows;
  std::vector<float> scales;

 private:
  static std::size_t page_bytes_for(const LoraModelConfig& config, Dtype dtype) {
    std::size_t features = 0;
    for (const LoraModule& module : config.modules()) {
      const auto most = std::max(module.in_features, module.out_features);
      features = std::max(features, static_cast<std::size_t>(most));
    }
    return (features * kMaxBlockRanks * element_bytes(dtype) + 63) / 64 * 64;
  }

  void fill(std::uint32_t row, Rng& rng) {
    const RowShape& shape = layout_.rows()[row];
    Row weights{shape.in.length, shape.out.length, shape.rank, {}, {},
                shape.in.offset, shape.out.offset};
    weights.a.resize(std::size_t{weights.rank} * weights.in);
    weights.b.resize(std::size_t{weights.rank} * weights.out);
    for (const Block& block : layout_.blocks_of_row(row)) {
      for (std::uint32_t r = 0; r < block.rank_count; ++r) {
        const std::uint32_t rank = block.rank_begin + r;
        for (const Part& part : layout_.a_parts(block)) {
          for (std::uint32_t i = 0; i < part.length; ++i) {
            weights.a[rank * weights.in + part.begin + i] =
                put(part, std::size_t{r} * part.length + i, rng);
          }
        }
        for (const Part& part : layout_.b_parts(block)) {
          for (std::uint32_t o = 0; o < part.length; ++o) {
            weights.b[(part.begin + o) * weights.rank + rank] =
                put(part, std::size_t{o} * block.rank_count + r, rng);
          }
        }
      }
    }
    weights.bias = fill_vector(layout_.bias_parts(row), 0.0F, rng);
    weights.dora_scale = fill_vector(layout_.dora_scale_parts(row), 1.5F, rng);
    rows.push_back(std::move(weights));
  }

  std::vector<float> fill_vector(std::span<const Part> parts, float around, Rng& rng) {
    std::vector<float> values;
    for (const Part& part : parts) {
      for (std::uint32_t i = 0; i < part.length; ++i) {
        values.push_back(around + uniform(rng));
        std::memcpy(pages().address(part.at) + i * sizeof(float), &values.back(), sizeof(float));
      }
    }
    return values;
  }

  float put(const Part& part, std::size_t index, Rng& rng) {
    std::byte* at = pages().address(part.at) + index * element_bytes(dtype_);
    store(at, dtype_, uniform(rng));
    return load(at, dtype_);
  }

  Dtype dtype_;
  std::size_t page_bytes_;
  Layout layout_;
  std::vector<std::byte> pool_;
  std::vector<PageId> pages_;
};

// A row-major matrix of activations with NaN between its rows, one element off any alignment.
class Matrix {
 public:
  Matrix(std::uint32_t rows, std::uint32_t features, Dtype dtype, std::uint32_t padding = 3)
      : rows_(rows),
        features_(features),
        stride_(features + padding),
        dtype_(dtype),
        bytes_((std::size_t{rows} * stride_ + 1) * element_bytes(dtype), std::byte{0xFF}) {}

  static Matrix random(std::uint32_t rows, std::uint32_t features, Dtype dtype, Rng& rng,
                       float magnitude = 1.0F, std::uint32_t padding = 3) {
    Matrix matrix(rows, features, dtype, padding);
    for (std::uint32_t row = 0; row < rows; ++row) {
      for (std::uint32_t i = 0; i < features; ++i) {
        matrix.set(row, i, magnitude * uniform(rng));
      }
    }
    return matrix;
  }

  // The same values in another dtype, or with other rows, each given by its index here.
  Matrix as(Dtype dtype) const {
    std::vector<std::uint32_t> all(rows_);
    std::iota(all.begin(), all.end(), 0U);
    return pick(all, dtype, stride_ - features_);
  }
  Matrix pick(const std::vector<std::uint32_t>& rows, Dtype dtype, std::uint32_t padding) const {
    Matrix picked(static_cast<std::uint32_t>(rows.size()), features_, dtype, padding);
    for (std::uint32_t row = 0; row < rows.size(); ++row) {
      for (std::uint32_t i = 0; i < features_; ++i) {
        picked.set(row, i, get(rows[row], i));
      }
    }
    return picked;
  }

  float get(std::uint32_t row, std::uint32_t i) const { return load(at(row, i), dtype_); }
  void set(std::uint32_t row, std::uint32_t i, float value) {
    store(const_cast<std::byte*>(at(row, i)), dtype_, value);
  }
  std::vector<std::byte> row_bytes(std::uint32_t row) const {
    return {at(row, 0), at(row, features_)};
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::byte* data() { return const_cast<std::byte*>(at(0, 0)); }
  std::int64_t stride() const { return stride_; }
  std::uint32_t rows() const { return rows_; }
  std::uint32_t features() const { return features_; }
  Dtype dtype() const { return dtype_; }

 private:
  const std::byte* at(std::uint32_t row, std::uint32_t i) const {
    return bytes_.data() + (std::size_t{row} * stride_ + i + 1) * element_bytes(dtype_);
  }

  std::uint32_t rows_;
  std::uint32_t features_;
  std::uint32_t stride_;
  Dtype dtype_;
  std::vector<std::byte> bytes_;
};

inline void apply(LoraOperator& lora, const LoraBatch& batch, std::uint32_t module, Matrix& x,
                  Matrix& y, Matrix* base_bias = nullptr) {
  lora.apply(batch, ModuleIndex{module},
             {x.data(), y.data(), x.stride(), y.stride(), x.rows(), x.dtype(),
              base_bias == nullptr ? nullptr : base_bias->data()});
}

inline LoraBatch batch_of(std::vector<LoraBatch::Segment> segments) { return LoraBatch(segments); }

}  // namespace pagedlora::testing_support
