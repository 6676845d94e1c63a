#include "pagedlora/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "paged_attention_fixture.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using namespace attention_test;
using testing_support::usable_isas;

double tolerance(Dtype dtype) {
  return dtype == Dtype::float32 ? 4e-6 : dtype == Dtype::float16 ? 1e-3 : 8e-3;
}

void expect_close(const Shape& shape, const std::vector<Piece>& pieces, const Elements& output) {
  std::size_t i = 0;
  for (const Piece& piece : pieces) {
    for (std::int64_t token = 0; token < piece.count; ++token) {
      for (int head = 0; head < shape.num_heads; ++head) {
        for (const double expected : reference(shape, *piece.story, piece.past + token, head)) {
          ASSERT_NEAR(double{output.get(i)}, expected,
                      tolerance(shape.dtype) * std::max(1.0, std::abs(expected)))
              << "position " << piece.past + token << " head " << head;
          ++i;
        }
      }
    }
  }
}

// Two rows of three requests: all start together, then one decodes, one goes on, one stays away.
void check_against_reference(const Shape& shape) {
  SCOPED_TRACE(::testing::Message() << shape);
  const std::vector<Story> stories = {make_story(shape, 1, 1), make_story(shape, 90, 2),
                                      make_story(shape, 147, 3)};
  for (const Isa isa : usable_isas()) {
    SCOPED_TRACE(isa_name(isa));
    Cache cache(shape, 300);
    std::vector<std::vector<std::int32_t>> blocks;
    for (const Story& story : stories) {
      blocks.push_back(cache.claim(story.tokens));
    }
    const std::vector<Piece> first = {{&stories[2], blocks[2], 0, 70},
                                      {&stories[0], blocks[0], 0, 1},
                                      {&stories[1], blocks[1], 0, 89}};
    expect_close(shape, first, run_row(shape, cache, first, isa));
    const std::vector<Piece> second = {{&stories[1], blocks[1], 89, 1},
                                       {&stories[2], blocks[2], 70, 77}};
    expect_close(shape, second, run_row(shape, cache, second, isa, true));
  }
}

TEST(PagedAttention, matches_float64_for_every_dtype_head_count_and_option) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {9, 3}, {8, 8}, {6, 2}}) {
      Shape shape;
      shape.dtype = dtype;
      shape.num_heads = heads;
      shape.num_kv_heads = kv_heads;
      check_against_reference(shape);
      shape.window = 7;
      check_against_reference(shape);
      shape.window = 0;
      shape.softcap = 2.0F;
      shape.with_sinks = true;
      check_against_reference(shape);
    }
  }
}

TEST(PagedAttention, matches_float64_for_every_head_dim) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const int dim : {1, 8, 16, 20, 64, 80, 96, 128, 256}) {
      Shape shape;
      shape.dtype = dtype;
      shape.num_heads = 3;
      shape.num_kv_heads = 1;
      shape.key_dim = dim;
      shape.value_dim = dim;
      check_against_reference(shape);
    }
  }
}

TEST(PagedAttention, matches_float64_when_key_and_value_dims_differ) {
  for (const auto& [key_dim, value_dim] : {std::pair{24, 16}, {8, 64}, {80, 20}, {96, 128}}) {
    Shape shape;
    shape.key_dim = key_dim;
    shape.value_dim = value_dim;
    shape.dtype = Dtype::bfloat16;
    check_against_reference(shape);
  }
}

TEST(PagedAttention, matches_float64_for_every_block_size_and_window) {
  for (const int block_size : {1, 4, 16, 48}) {
    for (const std::int64_t window : {0, 1, 2, 63, 64, 65, 100, 1000}) {
      Shape shape;
      shape.block_size = block_size;
      shape.window = window;
      shape.with_sinks = true;
      check_against_reference(shape);
    }
  }
}

TEST(PagedAttention, handles_more_query_heads_than_rows_of_a_pass) {
  Shape shape;
  shape.num_heads = 202;
  shape.num_kv_heads = 2;
  shape.key_dim = 8;
  shape.value_dim = 8;
  check_against_reference(shape);
}

std::vector<Shape> invariance_shapes() {
  std::vector<Shape> shapes;
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const std::int64_t window : {0, 50}) {
      for (const auto& [heads, kv_heads] : {std::pair{9, 3}, {2, 2}}) {
        Shape shape;
        shape.dtype = dtype;
        shape.window = window;
        shape.num_heads = heads;
        shape.num_kv_heads = kv_heads;
        shape.key_dim = 40;
        shape.value_dim = 80;
        shape.softcap = window == 0 ? 0.0F : 3.0F;
        shape.with_sinks = heads == 9;
        shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

TEST(PagedAttention, a_prompt_gives_the_same_bits_however_it_is_chunked) {
  for (const Shape& shape : invariance_shapes()) {
    SCOPED_TRACE(::testing::Message() << shape);
    const Story story = make_story(shape, 201, 5);
    for (const Isa isa : usable_isas()) {
      const Elements whole = run_in_chunks(shape, story, story.tokens, isa);
      for (const std::int64_t chunk : {1, 3, 16, 37, 64, 100}) {
        EXPECT_TRUE(run_in_chunks(shape, story, chunk, isa) == whole)
            << isa_name(isa) << " chunks of " << chunk;
      }
    }
  }
}

TEST(PagedAttention, neighbours_in_the_row_do_not_change_a_bit) {
  for (const Shape& shape : invariance_shapes()) {
    SCOPED_TRACE(::testing::Message() << shape);
    const Story mine = make_story(shape, 75, 6);
    const Story other = make_story(shape, 130, 7);
    for (const Isa isa : usable_isas()) {
      const Elements alone = run_in_chunks(shape, mine, mine.tokens, isa);
      Cache cache(shape, 200);
      const std::vector<Piece> row = {{&other, cache.claim(130), 0, 130},
                                      {&mine, cache.claim(75), 0, 75},
                                      {&other, cache.claim(130), 0, 1}};
      const Elements together = run_row(shape, cache, row, isa);
      const std::size_t start = index(130 * shape.num_heads * shape.value_dim);
      EXPECT_EQ(std::memcmp(together.at_element(start), alone.data(),
                            alone.size() * element_bytes(shape.dtype)),
                0)
          << isa_name(isa);
    }
  }
}

TEST(PagedAttention, a_token_is_not_touched_by_infinities_and_nans_of_later_ones) {
  Shape shape;
  Story story = make_story(shape, 70, 8);
  for (const Isa isa : usable_isas()) {
    const Elements clean = run_in_chunks(shape, story, story.tokens, isa);
    Story broken = story;
    const std::int64_t bad = 40;
    for (int i = 0; i < shape.num_kv_heads * shape.key_dim; ++i) {
      const auto at = index(bad * shape.num_kv_heads * shape.key_dim + i);
      broken.key.set(at, i % 2 == 0 ? kInfinity : std::nanf(""));
      broken.value.set(at, i % 2 == 0 ? std::nanf("") : kInfinity);
    }
    const Elements output = run_in_chunks(shape, broken, broken.tokens, isa);
    const auto row = index(shape.num_heads * shape.value_dim);
    EXPECT_EQ(std::memcmp(output.data(), clean.data(), index(bad) * row * 4), 0);
    for (std::size_t i = index(bad) * row; i < output.size(); ++i) {
      ASSERT_TRUE(std::isnan(output.get(i))) << isa_name(isa);
    }
  }
}

TEST(PagedAttention, keys_of_weight_zero_come_back_when_a_later_tile_is_finite) {
  Shape shape;
  Story story = make_story(shape, 80, 9);
  for (std::size_t i = 0; i < story.query.size(); ++i) {
    story.query.set(i, 1.0F);
  }
  const int token_size = shape.num_kv_heads * shape.key_dim;
  for (std::size_t i = 0; i < index(64 * token_size); ++i) {
    story.key.set(i, -kInfinity);  // the whole first tile has weight zero
  }
  for (const Isa isa : usable_isas()) {
    const Elements output = run_in_chunks(shape, story, story.tokens, isa);
    const std::size_t last = output.size() - index(shape.num_heads * shape.value_dim);
    EXPECT_TRUE(std::isnan(output.get(0)));  // as softmax of -infinity alone
    EXPECT_TRUE(std::isfinite(output.get(last))) << isa_name(isa);
    const std::vector<double> expected = reference(shape, story, 79, 0);
    EXPECT_NEAR(double{output.get(last)}, expected[0], 1e-5);
  }
}

TEST(PagedAttention, writes_exactly_the_new_keys_and_values) {
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.key_dim = 20;
    shape.value_dim = 24;
    const Story story = make_story(shape, 30, 10);
    const Story other = make_story(shape, 9, 11);
    for (const Isa isa : usable_isas()) {
      Cache cache(shape, 20);
      const std::vector<Piece> row = {{&story, cache.claim(30), 13, 17},
                                      {&other, cache.claim(9), 0, 5}};
      Cache expected = cache;
      const std::size_t bytes = element_bytes(dtype);
      for (const Piece& piece : row) {
        for (std::int64_t p = piece.past; p < piece.past + piece.count; ++p) {
          const std::int64_t slot =
              piece.blocks[index(p / shape.block_size)] * shape.block_size + p % shape.block_size;
          const auto keys = index(shape.num_kv_heads * shape.key_dim);
          const auto values = index(shape.num_kv_heads * shape.value_dim);
          std::memcpy(expected.keys.at_element(index(slot) * keys),
                      piece.story->key.at_element(index(p) * keys), keys * bytes);
          std::memcpy(expected.values.at_element(index(slot) * values),
                      piece.story->value.at_element(index(p) * values), values * bytes);
        }
      }
      run_row(shape, cache, row, isa, true);
      EXPECT_TRUE(cache.keys == expected.keys) << isa_name(isa);
      EXPECT_TRUE(cache.values == expected.values) << isa_name(isa);
    }
  }
}

TEST(PagedAttention, one_object_serves_growing_and_shrinking_shapes) {
  PagedAttention attention;
  std::vector<float> data(4096, 1.0F), output(4096), cache(65536);
  for (const int heads : {2, 16, 1, 8}) {
    const AttentionBatch batch({{{0, 1}, 3, 2}}, 4);
    AttentionArgs args;
    args.num_heads = heads;
    args.num_kv_heads = 1;
    args.key_dim = 8 * heads;
    args.value_dim = 8;
    args.query = {data.data(), 8 * heads, 8 * heads * heads};
    args.key = args.value = {data.data(), 0, 0};
    args.output = output.data();
    args.key_cache = cache.data();
    args.value_cache = cache.data() + 32768;
    args.num_blocks = 2;
    attention.run(batch, args);
    EXPECT_TRUE(std::isfinite(output[0]));
  }
}

}  // namespace
}  // namespace pagedlora
