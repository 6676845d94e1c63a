#include "internal/checksum.h"

#include <algorithm>
#include <array>
#include <bit>

#include "internal/checksum_lines.h"

namespace pagedlora::internal {
namespace {

ChecksumKernel choose_kernel([[maybe_unused]] Isa isa) {
#if defined(PAGEDLORA_HAVE_AVX2)
  if (isa >= Isa::avx2) {  // wider registers gain nothing: the cache delivers no faster
    return avx2_checksum_kernel;
  }
#endif
  return portable_checksum_kernel;
}

std::uint64_t mix(std::uint64_t value, std::uint64_t sum) {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd: multiplying loses nothing
  return std::rotl((value ^ sum ^ (sum >> 32)) * kFactor, 29);
}

}  // namespace

void portable_checksum_kernel(const std::byte* from, std::size_t num_lines, ChecksumSums& into) {
  using Vector = std::uint64_t __attribute__((vector_size(16)));
  add_checksum_lines<Vector>(from, num_lines, into);
}

Checksum::Checksum(Isa isa) : kernel_(choose_kernel(isa)) {}

void Checksum::update(std::span<const std::byte> bytes) { Piece(*this, bytes).finish(); }

void Checksum::Piece::add_up_to(std::size_t end) {
  if (end >= done_ + kChecksumLineBytes) {
    const std::size_t num_lines = (end - done_) / kChecksumLineBytes;
    checksum_.kernel_(bytes_.data() + done_, num_lines, checksum_.sums_);
    done_ += num_lines * kChecksumLineBytes;
  }
}

void Checksum::Piece::finish() {
  add_up_to(bytes_.size());
  std::array<std::byte, kChecksumLineBytes> last = {};
  std::ranges::copy(bytes_.subspan(done_), last.begin());
  checksum_.kernel_(last.data(), 1, checksum_.sums_);
  checksum_.sums_.sums[0] += bytes_.size();  // tells zeros at the end from none
}

std::uint64_t Checksum::value() const {
  std::uint64_t value = 0;
  for (std::size_t lane = 0; lane < kChecksumLanes; ++lane) {
    value = mix(mix(value, sums_.sums[lane]), sums_.weighted[lane]);
  }
  return value;
}

}  // namespace pagedlora::internal
