#include "internal/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "usable_isas.h"

namespace pagedlora::internal {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t size, std::uint32_t seed) {
  std::mt19937 rng(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(rng());
  }
  return bytes;
}

std::uint64_t checksum_of(const Bytes& bytes, Isa isa = default_isa()) {
  Checksum checksum(isa);
  checksum.update(bytes);
  return checksum.value();
}

TEST(Checksum, is_the_same_for_every_instruction_set) {
  for (std::size_t size = 0; size < 300; ++size) {
    const Bytes bytes = random_bytes(size, static_cast<std::uint32_t>(size));
    for (const Isa isa : testing_support::usable_isas()) {
      EXPECT_EQ(checksum_of(bytes, isa), checksum_of(bytes, Isa::portable))
          << size << " bytes, " << isa_name(isa);
    }
  }
}

TEST(Checksum, of_a_piece_does_not_depend_on_its_steps) {
  std::mt19937 rng(1);
  for (std::size_t size = 0; size < 1'000; ++size) {
    const Bytes bytes = random_bytes(size, static_cast<std::uint32_t>(size));
    Checksum checksum;
    Checksum::Piece piece(checksum, bytes);
    for (int step = 0; step < 4; ++step) {
      piece.add_up_to(rng() % (size + 1));  // some of them have been added already
    }
    piece.finish();
    EXPECT_EQ(checksum.value(), checksum_of(bytes)) << size << " bytes";
  }
}

TEST(Checksum, changes_with_every_bit) {
  for (const std::size_t size : {1U, 63U, 64U, 65U, 200U}) {
    Bytes bytes = random_bytes(size, 1);
    const std::uint64_t before = checksum_of(bytes);
    for (std::size_t bit = 0; bit < size * 8; ++bit) {
      const auto mask = static_cast<std::byte>(1U << bit % 8);
      bytes[bit / 8] ^= mask;
      EXPECT_NE(checksum_of(bytes), before) << "bit " << bit << " of " << size << " bytes";
      bytes[bit / 8] ^= mask;
    }
  }
}

TEST(Checksum, tells_zeros_at_the_end_from_none) {
  const std::uint64_t none = checksum_of(Bytes(0));
  for (std::size_t size = 1; size < 200; ++size) {
    EXPECT_NE(checksum_of(Bytes(size)), none);
    EXPECT_NE(checksum_of(Bytes(size)), checksum_of(Bytes(size - 1)));
  }
}

TEST(Checksum, changes_when_two_words_are_swapped) {
  Bytes bytes = random_bytes(512, 2);
  const std::uint64_t before = checksum_of(bytes);
  for (std::size_t a = 0; a < 64; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      Bytes swapped = bytes;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(a * 8),
                       swapped.begin() + static_cast<std::ptrdiff_t>(a * 8 + 8),
                       swapped.begin() + static_cast<std::ptrdiff_t>(b * 8));
      EXPECT_NE(checksum_of(swapped), before) << a << " and " << b;
    }
  }
}

// What sums modulo 2^64 are blind to if nothing spreads the top bits.
TEST(Checksum, changes_when_signs_do) {
  Bytes bytes = random_bytes(4096, 3);
  const std::uint64_t before = checksum_of(bytes);
  const auto flip = [&](Bytes& in, std::size_t float_index) {
    in[float_index * 4 + 3] ^= std::byte{0x80};
  };
  for (std::size_t first = 0; first < 1024; first += 7) {
    for (const std::size_t distance : {1U, 2U, 16U, 32U, 64U, 512U}) {
      if (first + distance < 1024) {
        Bytes changed = bytes;
        flip(changed, first);
        flip(changed, first + distance);
        EXPECT_NE(checksum_of(changed), before) << first << " and " << first + distance;
      }
    }
  }
  for (const std::size_t step : {1U, 2U, 16U}) {
    Bytes negated = bytes;
    for (std::size_t i = 0; i < 1024; i += step) {
      flip(negated, i);
    }
    EXPECT_NE(checksum_of(negated), before) << "every " << step;
  }
}

}  // namespace
}  // namespace pagedlora::internal
