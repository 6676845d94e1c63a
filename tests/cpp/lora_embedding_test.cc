// LoRA on embeddings (design 3.1: kind embedding): y += scale * B A[:, token], and how A is stored.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "all_dtypes.h"
#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/lora_operator.h"
#include "pagedlora/scatter_plan.h"
#include "pagedlora/task_entries.h"
#include "random_seeds.h"
#include "thrown_by.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using testing_support::batch_of;
using testing_support::FakeSource;
using testing_support::kDtypes;
using testing_support::kModule;
using testing_support::load;
using testing_support::Matrix;
using testing_support::Rng;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::store;
using testing_support::thrown_by;
using testing_support::uniform;
using testing_support::unit_roundoff;
using testing_support::usable_isas;

LoraModelConfig embedding_of(std::int64_t vocabulary, std::int64_t features) {
  return {{{"embed_tokens", -1, -1, vocabulary, features, ModuleKind::embedding}},
          Dtype::float32,
          LoraModelConfig::kMaxRank};
}

// An embedding adapter that came from a source through a ScatterPlan.
class Loaded {
 public:
  Loaded(const LoraModelConfig& config, std::vector<PlannedRow> rows, Dtype from, Dtype to,
         std::size_t max_part, std::size_t chunk_bytes, Rng& rng) {
    for (PlannedRow& row : rows) {
      const auto put = [&](std::size_t elements) {
        const PlannedMatrix matrix{bytes.size(), from};
        for (std::size_t i = 0; i < elements; ++i) {
          bytes.resize(bytes.size() + element_bytes(from));
          store(bytes.data() + bytes.size() - element_bytes(from), from, uniform(rng));
        }
        return matrix;
      };
      row.in = resolved(row.in, config.module(kModule).in_features);
      row.out = resolved(row.out, config.module(kModule).out_features);
      row.a = put(std::size_t{row.rank} * row.in.length);
      row.b = put(std::size_t{row.rank} * row.out.length);
    }
    source = std::make_shared<FakeSource>(bytes);
    plan = std::make_unique<AdapterPlan>(config, rows, source);
    layout = std::make_unique<Layout>(config, plan->row_shapes(),
                                      LayoutParams{kPageBytes, element_bytes(to), max_part});
    pool.resize(layout->num_pages() * kPageBytes, std::byte{0xFF});
    for (std::uint32_t page = 0; page < layout->num_pages(); ++page) {
      pages.push_back(PageId{page});
    }
    dtype = to;
    std::vector<std::byte> chunk(chunk_bytes);
    ScatterPlan(config, *plan, *layout).execute(*source->open(), to, chunk, view(), nullptr);
  }

  TaskPages view() {
    return {layout.get(), pages.data(), plan->scales().data(), pool.data(), kPageBytes, dtype};
  }

  // As the cache has it.
  float a(std::size_t row, std::uint32_t rank, std::uint32_t token) const {
    const PlannedRow& r = plan->rows()[row];
    return rounded(r.a, std::size_t{rank} * r.in.length + token);
  }
  float b(std::size_t row, std::uint32_t out, std::uint32_t rank) const {
    const PlannedRow& r = plan->rows()[row];
    return rounded(r.b, std::size_t{out} * r.rank + rank);
  }

  static constexpr std::size_t kPageBytes = 8192;

  std::vector<std::byte> bytes;
  std::shared_ptr<FakeSource> source;
  std::unique_ptr<AdapterPlan> plan;
  std::unique_ptr<Layout> layout;
  std::vector<std::byte> pool;
  std::vector<PageId> pages;
  Dtype dtype = Dtype::float32;

 private:
  float rounded(const PlannedMatrix& matrix, std::size_t element) const {
    std::byte narrowed[4];
    store(narrowed, dtype,
          load(bytes.data() + matrix.offset + element * element_bytes(matrix.dtype), matrix.dtype));
    return load(narrowed, dtype);
  }
};

PlannedRow row_of(std::uint32_t rank, float scale, FeatureRange in = {}, FeatureRange out = {}) {
  PlannedRow row;
  row.module = kModule;
  row.rank = rank;
  row.scale = scale;
  row.in = in;
  row.out = out;
  return row;
}

// Elements of `after` further from the exact sum than rounding explains.
int num_wrong(const Loaded& loaded, std::span<const std::int64_t> tokens, float factor,
              const Matrix& before, const Matrix& after) {
  int wrong = 0;
  for (std::uint32_t row = 0; row < before.rows(); ++row) {
    for (std::uint32_t o = 0; o < before.features(); ++o) {
      double exact = before.get(row, o);
      double magnitude = std::abs(exact);
      for (std::size_t r = 0; r < loaded.plan->rows().size(); ++r) {
        const PlannedRow& planned = loaded.plan->rows()[r];
        const std::int64_t token = tokens[row] - planned.in.offset;
        if (token < 0 || token >= planned.in.length || o < planned.out.offset ||
            o >= planned.out.end()) {
          continue;
        }
        for (std::uint32_t rank = 0; rank < planned.rank; ++rank) {
          const double term = static_cast<double>(factor) * planned.scale *
                              loaded.b(r, o - planned.out.offset, rank) *
                              loaded.a(r, rank, static_cast<std::uint32_t>(token));
          exact += term;
          magnitude += std::abs(term);
        }
      }
      const double allowed =
          (24 * unit_roundoff(Dtype::float32) + 2.1 * unit_roundoff(before.dtype())) * magnitude +
          0x1p-24;
      wrong += !(std::abs(after.get(row, o) - exact) <= allowed);
    }
  }
  return wrong;
}

class LoraEmbeddingTest : public ::testing::TestWithParam<Isa> {
 protected:
  std::vector<std::int64_t> tokens(std::uint32_t count, std::int64_t vocabulary) {
    std::vector<std::int64_t> ids(count);
    for (std::int64_t& id : ids) {
      id = static_cast<std::int64_t>(rng_() % static_cast<std::uint32_t>(vocabulary));
    }
    ids.front() = vocabulary - 1;
    return ids;
  }
  void apply(Loaded& loaded, const std::vector<std::int64_t>& ids, Matrix& y, float factor = 1.0F) {
    LoraOperator lora(loaded.dtype, GetParam());
    const auto rows = static_cast<std::uint32_t>(ids.size());
    lora.apply_embedding(batch_of({{loaded.view(), rows}}), kModule,
                         {ids.data(), y.data(), y.stride(), rows, y.dtype(), factor});
  }

  Rng rng_{21};
};

INSTANTIATE_TEST_SUITE_P(All, LoraEmbeddingTest, ::testing::ValuesIn(usable_isas()),
                         [](const auto& of) { return std::string(isa_name(of.param)); });

TEST_P(LoraEmbeddingTest, AddsTheColumnsOfItsTokens) {
  const LoraModelConfig config = embedding_of(1'000, 65);
  for (const std::uint32_t rank : {1U, 3U, 8U, 13U}) {
    for (const Dtype weights : kDtypes) {
      for (const Dtype activations : kDtypes) {
        for (const std::size_t max_part : {std::size_t{0}, std::size_t{640}}) {
          Loaded loaded(config, {row_of(rank, 0.75F)}, Dtype::float32, weights, max_part, 16'384,
                        rng_);
          const std::vector<std::int64_t> ids = tokens(21, 1'000);
          Matrix y = Matrix::random(21, 65, activations, rng_);
          const Matrix before = y;
          apply(loaded, ids, y, 2.5F);
          EXPECT_EQ(num_wrong(loaded, ids, 2.5F, before, y), 0) << "rank " << rank;
          std::vector<std::int64_t> others = ids;
          others[5] = (others[5] + 1) % 1'000;
          EXPECT_GT(num_wrong(loaded, others, 2.5F, before, y), 10);
        }
      }
    }
  }
}

TEST_P(LoraEmbeddingTest, TokensOutsideOfASliceOfTheVocabularyGetNothing) {
  const LoraModelConfig config = embedding_of(100, 40);
  Loaded loaded(config, {row_of(4, 1.0F, {10, 30}, {0, 20}), row_of(9, 0.5F, {40, 0}, {8, 32})},
                Dtype::float32, Dtype::float32, 0, 16'384, rng_);
  const std::vector<std::int64_t> ids{0, 9, 10, 39, 40, 99, 5, 41};
  Matrix y = Matrix::random(8, 40, Dtype::float32, rng_);
  const Matrix before = y;
  apply(loaded, ids, y);
  EXPECT_EQ(num_wrong(loaded, ids, 1.0F, before, y), 0);
  for (const std::uint32_t row : {0U, 1U, 6U}) {
    EXPECT_EQ(y.row_bytes(row), before.row_bytes(row));
  }
}

TEST_P(LoraEmbeddingTest, ARowIsBitIdenticalAloneAndAmongNeighbours) {
  const LoraModelConfig config = embedding_of(100, 40);
  Loaded loaded(config, {row_of(11, 1.5F)}, Dtype::bfloat16, Dtype::bfloat16, 0, 16'384, rng_);
  const std::vector<std::int64_t> ids = tokens(37, 100);
  Matrix y = Matrix::random(37, 40, Dtype::bfloat16, rng_);
  const Matrix before = y;
  apply(loaded, ids, y);
  for (std::uint32_t row = 0; row < 37; ++row) {
    Matrix alone = before.pick({row}, Dtype::bfloat16, 0);
    apply(loaded, {ids[row]}, alone);
    EXPECT_EQ(alone.row_bytes(0), y.row_bytes(row));
  }
}

TEST_P(LoraEmbeddingTest, KindsAreNotMixedUp) {
  const LoraModelConfig embedding = embedding_of(100, 40);
  Loaded loaded(embedding, {row_of(4, 1.0F)}, Dtype::float32, Dtype::float32, 0, 16'384, rng_);
  LoraOperator lora(Dtype::float32, GetParam());
  Matrix x = Matrix::random(2, 100, Dtype::float32, rng_);
  Matrix y = Matrix::random(2, 40, Dtype::float32, rng_);
  const Matrix before = y;
  EXPECT_THROW(testing_support::apply(lora, batch_of({{loaded.view(), 2}}), 0, x, y),
               InvalidArgumentError);
  testing_support::Adapter linear(testing_support::config_of({{100, 40}}), {{kModule, 4}},
                                  Dtype::float32, 0, rng_);
  const std::int64_t ids[] = {1, 2};
  EXPECT_THROW(lora.apply_embedding(batch_of({{linear.pages(), 2}}), kModule,
                                    {ids, y.data(), y.stride(), 2, Dtype::float32}),
               InvalidArgumentError);
  EXPECT_EQ(y.bytes(), before.bytes());
}

TEST(LoraEmbeddingStorageTest, IsExactForRandomSizesTilesAndChunks) {
  for (const std::uint32_t seed : seeds(60)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const auto pick = [&](std::uint32_t low, std::uint32_t high) {
      return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
    };
    const std::uint32_t vocabulary = pick(1, pick(0, 3) == 0 ? 20'000 : 500);
    const std::uint32_t rank = pick(1, 30);
    const Dtype from = kDtypes[pick(0, 2)];
    const Dtype to = kDtypes[pick(0, 2)];
    const LoraModelConfig config = embedding_of(vocabulary, 5);
    Loaded loaded(config, {row_of(rank, 1.0F)}, from, to, pick(0, 1) == 0 ? 0 : pick(32, 8'192),
                  ScatterPlan::kMinChunkBytes + pick(0, 20'000), rng);
    std::vector<std::byte> a(std::size_t{rank} * vocabulary * element_bytes(to));
    std::vector<std::byte> b(std::size_t{rank} * 5 * element_bytes(to));
    gather_row(loaded.view(), 0, a.data(), b.data());
    int wrong = 0;
    for (std::uint32_t r = 0; r < rank; ++r) {
      for (std::uint32_t token = 0; token < vocabulary; ++token) {
        const std::size_t at = (std::size_t{r} * vocabulary + token) * element_bytes(to);
        wrong += load(a.data() + at, to) != loaded.a(0, r, token);
      }
    }
    EXPECT_EQ(wrong, 0);
    // A token's weights lie side by side in every entry.
    for (const TaskLayerModuleConfig& entry : task_entries(loaded.view(), config)) {
      const auto* stored = std::bit_cast<const std::byte*>(entry.weights_in_pointer);
      if (entry.adapter_size >= 2 && entry.in_size >= 2) {
        EXPECT_EQ(load(stored + entry.adapter_size * element_bytes(to), to),
                  loaded.a(0, entry.adapter_size == 8 ? 0 : rank - entry.adapter_size,
                           entry.in_offset + 1));
        break;
      }
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(LoraEmbeddingStorageTest, AValueThatFloat16CannotHoldIsRefused) {
  Rng rng(1);
  const LoraModelConfig config = embedding_of(50, 4);
  Loaded loaded(config, {row_of(3, 1.0F)}, Dtype::float32, Dtype::float16, 0, 16'384, rng);
  store(loaded.source->bytes.data() + 4 * 77, Dtype::float32, 70'000.0F);
  std::vector<std::byte> chunk(ScatterPlan::kMinChunkBytes);
  const auto error = thrown_by<AdapterFormatError>([&] {
    ScatterPlan(config, *loaded.plan, *loaded.layout)
        .execute(*loaded.source->open(), Dtype::float16, chunk, loaded.view(), nullptr);
  });
  EXPECT_EQ(error ? error->tensor : "", "embed_tokens.lora_A");
}

}  // namespace
}  // namespace pagedlora
