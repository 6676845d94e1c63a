// Biases and DoRA scales from the source to their parts: always float32, whatever the cache's
// dtype.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "fake_source.h"
#include "lora_operator_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/scatter_plan.h"
#include "pagedlora/task_entries.h"

namespace pagedlora {
namespace {

using testing_support::config_of;
using testing_support::FakeSource;
using testing_support::load;
using testing_support::Rng;
using testing_support::store;
using testing_support::uniform;

class ScatterVectorsTest : public ::testing::Test {
 protected:
  std::uint64_t put(std::size_t elements, Dtype dtype) {
    const std::uint64_t offset = bytes_.size();
    bytes_.resize(bytes_.size() + elements * element_bytes(dtype));
    for (std::uint64_t at = offset; at < bytes_.size(); at += element_bytes(dtype)) {
      store(bytes_.data() + at, dtype, uniform(rng_));
    }
    return offset;
  }

  Rng rng_{5};
  std::vector<std::byte> bytes_;
};

TEST_F(ScatterVectorsTest, AreWidenedAndFoundAgain) {
  const LoraModelConfig config = config_of({{40, 9'000}, {16, 30}});
  for (const Dtype bias_dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    bytes_.clear();
    PlannedRow wide{
        ModuleIndex{0}, 3, {put(3 * 40, Dtype::float32)}, {put(3 * 9'000, Dtype::float32)}};
    wide.bias = {put(9'000, bias_dtype), bias_dtype};
    wide.dora_scale = {put(9'000, Dtype::float32)};
    PlannedRow narrow{
        ModuleIndex{1}, 2, {put(2 * 16, Dtype::float32)}, {put(2 * 30, Dtype::float32)}};
    narrow.dora_scale = {put(30, Dtype::float32)};
    const auto source = std::make_shared<FakeSource>(bytes_);
    const AdapterPlan plan(config, {wide, narrow}, source);
    const Layout layout(config, plan.row_shapes(), {4096, 2, 2048});
    std::vector<std::byte> pool(layout.num_pages() * 4096, std::byte{0xFF});
    std::vector<PageId> pages;
    for (std::uint32_t page = 0; page < layout.num_pages(); ++page) {
      pages.push_back(PageId{page});
    }
    const TaskPages view{&layout,     pages.data(), plan.scales().data(),
                         pool.data(), 4096,         Dtype::bfloat16};
    std::vector<std::byte> chunk(ScatterPlan::kMinChunkBytes);
    const ScatterPlan scatter(config, plan, layout);
    const auto outcome = scatter.execute(*source->open(), Dtype::bfloat16, chunk, view, nullptr);
    EXPECT_EQ(outcome.source_bytes, bytes_.size());
    const auto expect_vector = [&](const PlannedVector& vector, std::span<const Part> parts,
                                   std::size_t length) {
      std::vector<float> values(length);
      gather_vector(view, parts, values.data());
      for (std::size_t i = 0; i < length; ++i) {
        const std::byte* at = bytes_.data() + vector.offset + i * element_bytes(vector.dtype);
        ASSERT_EQ(values[i], load(at, vector.dtype)) << i;
      }
    };
    expect_vector(wide.bias, layout.bias_parts(0), 9'000);
    expect_vector(wide.dora_scale, layout.dora_scale_parts(0), 9'000);
    expect_vector(narrow.dora_scale, layout.dora_scale_parts(1), 30);
    EXPECT_TRUE(layout.bias_parts(1).empty());
  }
}

TEST_F(ScatterVectorsTest, BeyondTheSourceOrOfAnotherTypeAreRefused) {
  const LoraModelConfig config = config_of({{8, 8}});
  PlannedRow row{ModuleIndex{0}, 2, {put(16, Dtype::float32)}, {put(16, Dtype::float32)}};
  const std::uint64_t vector = put(8, Dtype::float32);
  const auto source = std::make_shared<FakeSource>(bytes_);
  const auto make = [&] { AdapterPlan(config, {row}, source); };
  row.bias = {vector, Dtype::float32};
  row.dora_scale = {vector, Dtype::float32};
  EXPECT_NO_THROW(make());
  row.bias.offset = vector + 1;
  EXPECT_THROW(make(), InvalidArgumentError);
  row.bias.offset = vector;
  row.dora_scale.dtype = Dtype::bfloat16;
  EXPECT_THROW(make(), InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
