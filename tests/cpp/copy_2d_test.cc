// copy_2d against a loop over dtype.h, for every pair of types and every variant.
#include "pagedlora/copy_2d.h"
#include "all_dtypes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "float_environment.h"
#include "pagedlora/cpu_features.h"
#include "pagedlora/dtype.h"
#include "usable_isas.h"

namespace pagedlora {
namespace {

using testing_support::kDtypes;
using testing_support::usable_isas;

constexpr std::byte kUntouched{0xEE};
constexpr std::size_t kGuardBytes = 128;

struct Shape {
  std::size_t rows;
  std::size_t row_elements;
  std::size_t gap_bytes;            // between the end of a row and the next
  std::size_t source_misalignment;  // bytes
  std::size_t target_misalignment;
  std::size_t second_misalignment;
};

// Memory aligned to a cache line plus `misalignment`, with guards on both sides.
class Target {
 public:
  Target(std::size_t num_bytes, std::size_t misalignment)
      : memory_(num_bytes + 2 * kGuardBytes + 64 + misalignment, kUntouched),
        num_bytes_(num_bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuardBytes;
    start_ = kGuardBytes + (64 - address % 64) % 64 + misalignment;
  }

  std::byte* data() { return memory_.data() + start_; }
  std::vector<std::byte> bytes() const {
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(start_);
    return {begin, begin + static_cast<std::ptrdiff_t>(num_bytes_)};
  }
  bool guards_are_whole() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if ((i < start_ || i >= start_ + num_bytes_) && memory_[i] != kUntouched) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<std::byte> memory_;
  std::size_t num_bytes_;
  std::size_t start_;
};

template <class From, class To>
bool convert(const std::byte* from, std::byte* to) {
  From value;
  std::memcpy(&value, from, sizeof(value));
  const To result = narrow<To>(widen(value));
  std::memcpy(to, &result, sizeof(result));
  return !(std::is_same_v<To, Float16> && overflows_float16(widen(value)));
}

template <class From>
bool convert_to(Dtype target, const std::byte* from, std::byte* to) {
  switch (target) {
    case Dtype::float32:
      return convert<From, float>(from, to);
    case Dtype::float16:
      return convert<From, Float16>(from, to);
    case Dtype::bfloat16:
      return convert<From, Bfloat16>(from, to);
  }
  return false;
}

bool convert_element(Dtype source, Dtype target, const std::byte* from, std::byte* to) {
  if (source == target) {
    std::memcpy(to, from, element_bytes(source));
    return true;
  }
  switch (source) {
    case Dtype::float32:
      return convert_to<float>(target, from, to);
    case Dtype::float16:
      return convert_to<Float16>(target, from, to);
    case Dtype::bfloat16:
      return convert_to<Bfloat16>(target, from, to);
  }
  return false;
}

bool copy_by_element(const Copy2d& copy, Dtype source, Dtype target) {
  bool fits = true;
  std::byte* to = copy.target;
  for (std::size_t row = 0; row < copy.rows; ++row) {
    for (std::size_t i = 0; i < copy.row_elements; ++i) {
      const std::byte* from =
          copy.source + row * copy.source_stride_bytes + i * element_bytes(source);
      fits &= convert_element(source, target, from, to);
      to += element_bytes(target);
    }
  }
  return fits;
}

// Bit patterns of which a quarter is special: zeros, subnormals, infinities, NaNs, limits.
std::vector<std::byte> make_source(std::size_t num_bytes, std::uint32_t seed) {
  static constexpr std::uint32_t kSpecial[] = {
      0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F800001,
      0xFFC00000, 0x7FFFFFFF, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x33000000, 0x33000001,
      0x387FC000, 0x3F808000, 0x3F818000, 0x00018000, 0x7C007C01, 0xFE007E00, 0x000103FF};
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(num_bytes + 4);
  for (std::size_t i = 0; i + 4 <= bytes.size(); i += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    const std::uint32_t chosen = word % 4 == 0 ? kSpecial[(word >> 8) % std::size(kSpecial)] : word;
    std::memcpy(bytes.data() + i, &chosen, 4);
  }
  return bytes;
}

class Copy2dTest : public ::testing::TestWithParam<std::tuple<Dtype, Dtype, Isa>> {
 protected:
  static Dtype source_dtype() { return std::get<0>(GetParam()); }
  static Dtype target_dtype() { return std::get<1>(GetParam()); }
  static Isa isa() { return std::get<2>(GetParam()); }

  void expect_same_as_by_element(const Shape& shape, bool with_second) {
    SCOPED_TRACE("rows " + std::to_string(shape.rows) + " of " +
                 std::to_string(shape.row_elements) + " elements, gap " +
                 std::to_string(shape.gap_bytes) + ", misaligned by " +
                 std::to_string(shape.source_misalignment) + "/" +
                 std::to_string(shape.target_misalignment) + "/" +
                 std::to_string(shape.second_misalignment) + (with_second ? ", two targets" : ""));
    const std::size_t stride = shape.row_elements * element_bytes(source_dtype()) + shape.gap_bytes;
    const auto source = make_source(shape.source_misalignment + shape.rows * stride, 7);
    const std::size_t num_bytes = shape.rows * shape.row_elements * element_bytes(target_dtype());
    Target expected(num_bytes, 0);
    Target first(num_bytes, shape.target_misalignment);
    Target second(num_bytes, shape.second_misalignment);
    Copy2d copy{.source = source.data() + shape.source_misalignment,
                .source_stride_bytes = stride,
                .target = expected.data(),
                .second_target = nullptr,
                .rows = shape.rows,
                .row_elements = shape.row_elements};
    const bool fits = copy_by_element(copy, source_dtype(), target_dtype());
    copy.target = first.data();
    copy.second_target = with_second ? second.data() : nullptr;
    EXPECT_EQ(copy_2d(copy, source_dtype(), target_dtype(), isa()), fits);
    EXPECT_TRUE(first.bytes() == expected.bytes());
    EXPECT_TRUE(second.bytes() ==
                (with_second ? expected.bytes() : std::vector<std::byte>(num_bytes, kUntouched)));
    EXPECT_TRUE(first.guards_are_whole());
    EXPECT_TRUE(second.guards_are_whole());
  }
};

TEST_P(Copy2dTest, EveryWidthAndTail) {
  for (std::size_t width = 1; width <= 140; ++width) {
    expect_same_as_by_element({1, width, 0, 0, 0, 0}, width % 2 == 0);
    expect_same_as_by_element({3, width, 6, 0, 0, 0}, width % 2 == 1);
  }
}

TEST_P(Copy2dTest, RowsOfEightFromWiderRows) {
  for (const std::size_t rank : {8U, 16U, 24U, 64U}) {
    const std::size_t gap = (rank - 8) * element_bytes(source_dtype());
    for (const std::size_t rows : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 31U, 1000U, 1003U}) {
      expect_same_as_by_element({rows, 8, gap, 0, 0, 0}, false);
      expect_same_as_by_element({rows, 8, gap, 2, 0, 0}, true);
    }
  }
}

TEST_P(Copy2dTest, LargeCopiesAtAnyAlignment) {
  for (const std::size_t misalignment : {0U, 1U, 2U, 4U, 16U, 32U, 48U, 60U, 63U}) {
    expect_same_as_by_element({1, 5003, 0, misalignment, misalignment, misalignment}, true);
    expect_same_as_by_element({1, 5003, 0, 1, misalignment, 0}, true);
    expect_same_as_by_element({701, 8, 16, 1, misalignment, misalignment}, true);
    expect_same_as_by_element({701, 8, 16, 0, misalignment, 16}, true);
    expect_same_as_by_element({7, 1001, 2, 0, misalignment, misalignment}, true);
    expect_same_as_by_element({9, 1024, 64, 3, misalignment, misalignment}, false);
  }
}

TEST_P(Copy2dTest, NothingToCopyTouchesNothing) {
  const Copy2d no_rows{.rows = 0, .row_elements = 8};
  EXPECT_TRUE(copy_2d(no_rows, source_dtype(), target_dtype(), isa()));
  const Copy2d no_elements{.rows = 3, .row_elements = 0};
  EXPECT_TRUE(copy_2d(no_elements, source_dtype(), target_dtype(), isa()));
}

TEST_P(Copy2dTest, FlushModesChangeNothing) {
  const std::size_t count = 65536;
  std::vector<std::byte> source(count * element_bytes(source_dtype()));
  for (std::uint32_t i = 0; i < count; ++i) {  // every 16-bit pattern, as the value's upper half
    const std::uint32_t bits = source_dtype() == Dtype::float32 ? i << 16 | 0x4001U : i;
    std::memcpy(source.data() + i * element_bytes(source_dtype()), &bits,
                element_bytes(source_dtype()));
  }
  Target expected(count * element_bytes(target_dtype()), 0);
  Target actual(count * element_bytes(target_dtype()), 0);
  Copy2d copy{.source = source.data(),
              .source_stride_bytes = source.size(),
              .target = expected.data(),
              .rows = 1,
              .row_elements = count};
  const bool fits = copy_by_element(copy, source_dtype(), target_dtype());
  copy.target = actual.data();
  {
    const testing_support::FlushSubnormals flush;
    EXPECT_EQ(copy_2d(copy, source_dtype(), target_dtype(), isa()), fits);
  }
  EXPECT_TRUE(actual.bytes() == expected.bytes());
}

// The byte after the source belongs to a page that may not be read.
TEST_P(Copy2dTest, ReadsNothingBeyondTheSource) {
  constexpr std::size_t kPage = 4096;
  void* memory = ::mmap(nullptr, 3 * kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* start = static_cast<std::byte*>(memory);
  ASSERT_EQ(::mprotect(start, kPage, PROT_NONE), 0);
  ASSERT_EQ(::mprotect(start + 2 * kPage, kPage, PROT_NONE), 0);
  std::vector<std::byte> target(kPage * 2);
  const std::size_t element = element_bytes(source_dtype());
  for (std::size_t count = 1; count <= 100; ++count) {
    const std::byte* at_end = start + 2 * kPage - count * element;
    for (const std::byte* from : {static_cast<const std::byte*>(start + kPage), at_end}) {
      const Copy2d row{.source = from,
                       .source_stride_bytes = count * element,
                       .target = target.data(),
                       .rows = 1,
                       .row_elements = count};
      EXPECT_TRUE(copy_2d(row, source_dtype(), target_dtype(), isa()));
    }
    const std::size_t stride = 10 * element;
    const std::size_t rows = std::min(count, (kPage - 8 * element) / stride + 1);
    const Copy2d pieces{.source = start + 2 * kPage - ((rows - 1) * stride + 8 * element),
                        .source_stride_bytes = stride,
                        .target = target.data(),
                        .rows = rows,
                        .row_elements = 8};
    EXPECT_TRUE(copy_2d(pieces, source_dtype(), target_dtype(), isa()));
  }
  EXPECT_EQ(::munmap(memory, 3 * kPage), 0);
}

std::string case_name(const ::testing::TestParamInfo<Copy2dTest::ParamType>& info) {
  const auto& [source, target, isa] = info.param;
  return std::string(dtype_name(source)) + "_to_" + std::string(dtype_name(target)) + "_" +
         std::string(isa_name(isa));
}

INSTANTIATE_TEST_SUITE_P(AllPairs, Copy2dTest,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::ValuesIn(kDtypes),
                                            ::testing::ValuesIn(usable_isas())),
                         case_name);

class Copy2dOverflowTest : public ::testing::TestWithParam<Isa> {
 protected:
  // 75 ones but for `value` at `position`, to float16.
  static bool fits(float value, std::size_t position, std::size_t row_elements) {
    std::vector<float> source(75, 1.0F);
    source[position] = value;
    std::vector<std::byte> target(source.size() * 2);
    const Copy2d copy{.source = std::as_bytes(std::span(source)).data(),
                      .source_stride_bytes = row_elements * 4,
                      .target = target.data(),
                      .rows = source.size() / row_elements,
                      .row_elements = row_elements};
    return copy_2d(copy, Dtype::float32, Dtype::float16, GetParam());
  }
};

TEST_P(Copy2dOverflowTest, OneFiniteValueAnywhereIsReported) {
  for (std::size_t position = 0; position < 75; ++position) {
    for (const std::size_t row_elements : {75U, 25U, 5U}) {
      EXPECT_FALSE(fits(65520.0F, position, row_elements)) << position;
      EXPECT_FALSE(fits(-std::numeric_limits<float>::max(), position, row_elements)) << position;
      EXPECT_TRUE(fits(65519.0F, position, row_elements)) << position;
      EXPECT_TRUE(fits(std::numeric_limits<float>::infinity(), position, row_elements));
      EXPECT_TRUE(fits(std::numeric_limits<float>::quiet_NaN(), position, row_elements));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryVariant, Copy2dOverflowTest, ::testing::ValuesIn(usable_isas()),
                         [](const auto& each) { return std::string(isa_name(each.param)); });

}  // namespace
}  // namespace pagedlora
