#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/paged_attention.h"

namespace pagedlora {
namespace {

TEST(AttentionBatch, counts_the_new_tokens) {
  const AttentionBatch batch({{{5, 6}, 3, 5}, {{1}, 0, 2}}, 4);
  EXPECT_EQ(batch.num_tokens(), 7);
  EXPECT_EQ(batch.block_size(), 4);
  EXPECT_EQ(batch.sequences().size(), 2U);
}

TEST(AttentionBatch, refuses_counts_and_tables_that_do_not_fit) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(AttentionBatch({}, 0), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{0}, -1, 1}}, 4), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{0}, 0, 0}}, 4), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{0}, 0, -1}}, 4), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{0}, 2, 3}}, 4), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{}, 0, 1}}, 4), InvalidArgumentError);
  EXPECT_THROW(AttentionBatch({{{0}, kMax, 1}}, 4), InvalidArgumentError);
  EXPECT_NO_THROW(AttentionBatch({{{0}, 2, 2}}, 4));
  EXPECT_NO_THROW(AttentionBatch({}, 4));
}

class PagedAttentionRefusal : public ::testing::Test {
 protected:
  PagedAttentionRefusal() {
    args_.query = args_.key = args_.value = {data_.data(), 8, 16};
    args_.output = output_.data();
    args_.key_cache = keys_.data();
    args_.value_cache = values_.data();
    args_.num_blocks = 2;
    args_.num_heads = args_.num_kv_heads = 2;
    args_.key_dim = args_.value_dim = 8;
  }

  void TearDown() override {  // every test ends with a refusal, which must not have written
    EXPECT_THROW(attention_.run(batch_, args_), InvalidArgumentError);
    for (const std::vector<float>* memory : {&output_, &keys_, &values_}) {
      EXPECT_EQ(std::count(memory->begin(), memory->end(), 7.0F), 256);
    }
  }

  std::vector<float> data_ = std::vector<float>(256, 1.0F);
  std::vector<float> output_ = std::vector<float>(256, 7.0F);
  std::vector<float> keys_ = output_, values_ = output_;
  AttentionBatch batch_{{{{0}, 0, 3}, {{1}, 0, 1}}, 4};
  AttentionArgs args_;
  PagedAttention attention_;
};

TEST_F(PagedAttentionRefusal, no_heads) { args_.num_heads = 0; }
TEST_F(PagedAttentionRefusal, no_kv_heads) { args_.num_kv_heads = 0; }
TEST_F(PagedAttentionRefusal, heads_not_a_multiple_of_kv_heads) { args_.num_heads = 3; }
TEST_F(PagedAttentionRefusal, key_dim_zero) { args_.key_dim = 0; }
TEST_F(PagedAttentionRefusal, value_dim_negative) { args_.value_dim = -8; }
TEST_F(PagedAttentionRefusal, window_negative) { args_.sliding_window = -1; }
TEST_F(PagedAttentionRefusal, softcap_negative) { args_.softcap = -1.0F; }
TEST_F(PagedAttentionRefusal, softcap_not_a_number) { args_.softcap = std::nanf(""); }
TEST_F(PagedAttentionRefusal, block_beyond_the_cache) { args_.num_blocks = 1; }
TEST_F(PagedAttentionRefusal, block_negative) {
  batch_ = AttentionBatch({{{0}, 0, 3}, {{-1}, 0, 1}}, 4);
}
TEST_F(PagedAttentionRefusal, query_null) { args_.query.data = nullptr; }
TEST_F(PagedAttentionRefusal, key_null) { args_.key.data = nullptr; }
TEST_F(PagedAttentionRefusal, value_null) { args_.value.data = nullptr; }
TEST_F(PagedAttentionRefusal, output_null) { args_.output = nullptr; }
TEST_F(PagedAttentionRefusal, key_cache_null) { args_.key_cache = nullptr; }
TEST_F(PagedAttentionRefusal, value_cache_null) { args_.value_cache = nullptr; }
TEST_F(PagedAttentionRefusal, cache_larger_than_memory) {
  args_.num_blocks = std::numeric_limits<std::int64_t>::max();
}

TEST(PagedAttention, an_empty_batch_does_nothing) {
  AttentionArgs args;
  args.num_heads = args.num_kv_heads = args.key_dim = args.value_dim = 1;
  EXPECT_NO_THROW(PagedAttention().run(AttentionBatch({}, 16), args));
}

}  // namespace
}  // namespace pagedlora
