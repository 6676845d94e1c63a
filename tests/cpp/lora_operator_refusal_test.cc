// Calls of a LoraOperator that would read or write what is not theirs: refused before they do.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lora_operator_fixture.h"
#include "pagedlora/errors.h"
#include "pagedlora/lora_operator.h"

namespace pagedlora {
namespace {

using testing_support::Adapter;
using testing_support::batch_of;
using testing_support::config_of;
using testing_support::kModule;
using testing_support::Matrix;
using testing_support::Rng;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgumentError& error) {
    return error.what();
  }
  return "";
}

class LoraOperatorRefusalTest : public testing::Test {
 protected:
  // What a call with changed activations says; y is checked to be as it was.
  std::string refused(const std::function<void(Activations&)>& change, std::uint32_t rows = 3) {
    Matrix x = Matrix::random(rows, 33, Dtype::float32, rng_);
    Matrix y = Matrix::random(rows, 17, Dtype::float32, rng_);
    const Matrix before = y;
    Activations activations{x.data(), y.data(), x.stride(), y.stride(), rows, Dtype::float32};
    change(activations);
    const std::string what =
        refusal([&] { lora_.apply(batch_of({{adapter_.pages(), rows}}), kModule, activations); });
    if (!what.empty()) {
      EXPECT_EQ(y.bytes(), before.bytes());
    }
    return what;
  }

  Rng rng_{1};
  Adapter adapter_{config_of({{33, 17}}), {{kModule, 4}}, Dtype::float32, 0, rng_};
  LoraOperator lora_{Dtype::float32};
};

TEST_F(LoraOperatorRefusalTest, NullPointers) {
  EXPECT_EQ(refused([](Activations& call) { call.x = nullptr; }),
            "x is null, and the batch has 3 rows: give the address of its first element");
  EXPECT_EQ(refused([](Activations& call) { call.y = nullptr; }),
            "y is null, and the batch has 3 rows: give the address of its first element");
  const LoraBatch base = batch_of({{std::nullopt, 2}});
  EXPECT_NE(refusal([&] { lora_.apply(base, kModule, Activations{.num_rows = 2}); }), "");
  EXPECT_EQ(refusal([&] { lora_.apply(batch_of({}), kModule, Activations{}); }), "");
}

TEST_F(LoraOperatorRefusalTest, NullTokens) {
  Matrix y(2, 17, Dtype::float32);
  const LoraBatch base = batch_of({{std::nullopt, 2}});
  EXPECT_NE(refusal([&] {
              lora_.apply_embedding(base, kModule, {nullptr, y.data(), y.stride(), 2});
            }).find("token_ids is null"),
            std::string::npos);
}

TEST_F(LoraOperatorRefusalTest, StridesLessThanTheWidth) {
  EXPECT_NE(refused([](Activations& call) {
              call.x_row_stride = 32;
            }).find("the row stride of x is 32 elements, and adapters of the batch use 33"),
            std::string::npos);
  EXPECT_NE(refused([](Activations& call) {
              call.y_row_stride = 16;
            }).find("the row stride of y is 16 elements, and adapters of the batch use 17"),
            std::string::npos);
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-36}, INT64_MIN}) {
    EXPECT_NE(refused([=](Activations& call) { call.x_row_stride = stride; }), "");
    EXPECT_NE(refused([=](Activations& call) { call.y_row_stride = stride; }), "");
  }
}

TEST_F(LoraOperatorRefusalTest, AStrideThatIsNeverUsedMayBeAnything) {
  EXPECT_EQ(refused([](Activations& call) { call.x_row_stride = call.y_row_stride = 0; }, 1), "");
}

TEST_F(LoraOperatorRefusalTest, OnlyWhatAdaptersUseOfARowCounts) {
  const LoraModelConfig config = config_of({{33, 17}});
  Adapter sliced(config, {{kModule, 4, {0, 8}, {0, 8}}}, Dtype::float32, 0, rng_);
  Matrix x = Matrix::random(2, 8, Dtype::float32, rng_, 1.0F, 0);
  Matrix y = Matrix::random(2, 8, Dtype::float32, rng_, 1.0F, 0);
  const Activations activations{x.data(), y.data(), 8, 8, 2, Dtype::float32};
  EXPECT_EQ(refusal([&] { lora_.apply(batch_of({{sliced.pages(), 2}}), kModule, activations); }),
            "");
}

TEST_F(LoraOperatorRefusalTest, MoreRowsThanCanBeCounted) {
  EXPECT_EQ(refusal([] { batch_of({{std::nullopt, UINT32_MAX}, {std::nullopt, 2}}); }),
            "the segments of LoraBatch have more than 2^32 - 1 rows: a segment of 2 follows "
            "4294967295");
  EXPECT_EQ(batch_of({{std::nullopt, UINT32_MAX - 1}, {std::nullopt, 1}}).num_rows(), UINT32_MAX);
}

TEST_F(LoraOperatorRefusalTest, DtypesThatAreNone) {
  EXPECT_NE(refused([](Activations& call) {
              call.dtype = static_cast<Dtype>(7);
            }).find("dtype of number 7"),
            std::string::npos);
}

TEST_F(LoraOperatorRefusalTest, PagesOfAnotherDtypeOfTheSameSize) {
  Adapter half(config_of({{33, 17}}), {{kModule, 4}}, Dtype::float16, 0, rng_);
  LoraOperator lora(Dtype::bfloat16);
  Matrix x = Matrix::random(1, 33, Dtype::float32, rng_);
  Matrix y = Matrix::random(1, 17, Dtype::float32, rng_);
  EXPECT_EQ(refusal([&] { testing_support::apply(lora, batch_of({{half.pages(), 1}}), 0, x, y); }),
            "pages of float16 given to a LoraOperator for bfloat16");
}

}  // namespace
}  // namespace pagedlora
