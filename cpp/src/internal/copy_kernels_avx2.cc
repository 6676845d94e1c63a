// Compiled with AVX2 flags: everything but avx2_copy_kernel has internal linkage (see
// avx2_lanes.h).
#if defined(PAGEDLORA_HAVE_AVX2)

#include "internal/avx2_lanes.h"
#include "internal/copy_kernels.h"

namespace pagedlora::internal {
namespace {

constexpr std::size_t kLineBytes = 64;
// Rows of this many elements, taken from wider ones, are what a rank block's B matrix consists of.
constexpr std::size_t kPieceElements = 8;
static_assert(kPieceElements == kWidth);

// Below this much output, waiting for streaming stores to finish costs more than they save.
constexpr std::size_t kMinStreamedBytes = 4096;

// A cache line of output, which is written as a whole.
struct Line {
  Words low;
  Words high;
};

// Where the output goes: both targets advance together. Lines that are aligned in both bypass the
// caches, which saves reading the target before it is written.
class Sink {
 public:
  Sink(const Copy2d& copy, bool may_stream)
      : target_(copy.target), second_(copy.second_target), may_stream_(may_stream) {}

  // Bytes up to the next line that can be streamed; 0 if there is none or it is this one.
  std::size_t bytes_to_alignment() const {
    const std::size_t phase = address(target_) % kLineBytes;
    const bool in_step = second_ == nullptr || address(second_) % kLineBytes == phase;
    return may_stream_ && in_step && phase != 0 ? kLineBytes - phase : 0;
  }

  // What to pass to put_line from here on, as long as nothing but lines is put.
  bool streams() const {
    return may_stream_ && (address(target_) | address(second_)) % kLineBytes == 0;
  }

  PAGEDLORA_INLINE void put_line(const Line& line, bool streaming) {
    store_line(target_, line, streaming);
    if (second_ != nullptr) {
      store_line(second_, line, streaming);
    }
    advance(kLineBytes);
  }

  // The first `num_bytes`, fewer than a line.
  void put_part(const Line& line, std::size_t num_bytes) {
    std::byte bytes[kLineBytes];
    store_line(bytes, line, false);
    __builtin_memcpy(target_, bytes, num_bytes);
    if (second_ != nullptr) {
      __builtin_memcpy(second_, bytes, num_bytes);
    }
    advance(num_bytes);
  }

 private:
  static std::uintptr_t address(const std::byte* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }

  PAGEDLORA_INLINE static void store_line(std::byte* into, const Line& line, bool streaming) {
    auto* words = reinterpret_cast<Words*>(into);
    if (streaming) {
      _mm256_stream_si256(words, line.low);
      _mm256_stream_si256(words + 1, line.high);
    } else {
      _mm256_storeu_si256(words, line.low);
      _mm256_storeu_si256(words + 1, line.high);
    }
  }

  void advance(std::size_t num_bytes) {
    target_ += num_bytes;
    if (second_ != nullptr) {
      second_ += num_bytes;
    }
  }

  std::byte* target_;
  std::byte* second_;
  bool may_stream_;
};

// One group is kWidth elements. Sources are addressed by the byte: they need no alignment.
template <class From>
PAGEDLORA_INLINE Floats load_group(const std::byte* from) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  if constexpr (sizeof(From) == sizeof(float)) {
    return _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const Words*>(from)));
  } else if constexpr (kEvenOdd<From>) {
    return widen_bfloat16(_mm_loadu_si128(halves));
  } else {
    return _mm256_cvtph_ps(_mm_loadu_si128(halves));
  }
}

// Adds the lanes whose finite value becomes an infinity in float16.
PAGEDLORA_INLINE void note_overflow(Floats v, Words& overflowed) {
  const Words magnitude = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7FFFFFFF));
  const Words large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x477FEFFF));
  const Words finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude);
  overflowed = _mm256_or_si256(overflowed, _mm256_and_si256(large, finite));
}

// Sixteen elements of two bytes.
template <class To>
PAGEDLORA_INLINE Words narrow_groups(Floats first, Floats second, Words& overflowed) {
  if constexpr (kEvenOdd<To>) {
    const Words packed =
        _mm256_packus_epi32(narrow_bfloat16_words(first), narrow_bfloat16_words(second));
    return _mm256_permute4x64_epi64(packed, 0xD8);  // the packing is by 128-bit lane
  } else {
    note_overflow(first, overflowed);
    note_overflow(second, overflowed);
    return join_lanes(narrow_float16(first), narrow_float16(second));
  }
}

// A line of the target made of groups of the source, `stride` bytes apart.
template <class From, class To>
PAGEDLORA_INLINE Line convert_line(const std::byte* from, std::size_t stride, Words& overflowed) {
  if constexpr (sizeof(To) == sizeof(float)) {
    return {_mm256_castps_si256(canonical(load_group<From>(from))),
            _mm256_castps_si256(canonical(load_group<From>(from + stride)))};
  } else {
    const Words low =
        narrow_groups<To>(load_group<From>(from), load_group<From>(from + stride), overflowed);
    from += 2 * stride;
    return {low,
            narrow_groups<To>(load_group<From>(from), load_group<From>(from + stride), overflowed)};
  }
}

// The same for equal types, whose bits are not looked at.
template <std::size_t kBytes>
PAGEDLORA_INLINE Line gather_line(const std::byte* from, std::size_t stride) {
  const auto load_128 = [&](std::size_t group) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + group * stride));
  };
  const auto load_256 = [&](std::size_t group) {
    return _mm256_loadu_si256(reinterpret_cast<const Words*>(from + group * stride));
  };
  if constexpr (kBytes == sizeof(float)) {
    return {load_256(0), load_256(1)};
  } else {
    return {join_lanes(load_128(0), load_128(1)), join_lanes(load_128(2), load_128(3))};
  }
}

template <class From, class To>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

template <class From, class To>
PAGEDLORA_INLINE Line make_line(const std::byte* from, std::size_t stride, Words& overflowed) {
  if constexpr (kSame<From, To>) {
    return gather_line<sizeof(From)>(from, stride);
  } else {
    return convert_line<From, To>(from, stride, overflowed);
  }
}

// The first `count` elements of a line; nothing beyond them is read.
template <class From, class To>
Line make_part(const std::byte* from, std::size_t count, Words& overflowed) {
  constexpr std::uint32_t kBytes = kLineBytes / sizeof(To) * sizeof(From);
  std::byte part[kBytes];
  copy_part<kBytes>(from, count * sizeof(From), part);
  return make_line<From, To>(part, kWidth * sizeof(From), overflowed);
}

template <class From, class To>
void copy_row(const std::byte* from, std::size_t num_elements, Sink& sink, Words& overflowed) {
  constexpr std::size_t kStep = kLineBytes / sizeof(To);
  const std::size_t head = sink.bytes_to_alignment() / sizeof(To);
  if (head != 0 && head < num_elements) {
    sink.put_part(make_part<From, To>(from, head, overflowed), head * sizeof(To));
    from += head * sizeof(From);
    num_elements -= head;
  }
  const bool streaming = sink.streams();
  for (; num_elements >= kStep; num_elements -= kStep) {
    sink.put_line(make_line<From, To>(from, kWidth * sizeof(From), overflowed), streaming);
    from += kStep * sizeof(From);
  }
  if (num_elements != 0) {
    sink.put_part(make_part<From, To>(from, num_elements, overflowed), num_elements * sizeof(To));
  }
}

template <class From, class To>
void copy_pieces(const Copy2d& copy, Sink& sink, Words& overflowed) {
  constexpr std::size_t kPieceBytes = kPieceElements * sizeof(To);
  constexpr std::size_t kStep = kLineBytes / kPieceBytes;
  const std::size_t stride = copy.source_stride_bytes;
  const std::byte* from = copy.source;
  std::size_t rows = copy.rows;
  const auto put_one = [&] {
    sink.put_part(make_part<From, To>(from, kPieceElements, overflowed), kPieceBytes);
    from += stride;
  };
  std::size_t head = sink.bytes_to_alignment() / kPieceBytes;
  for (; head != 0 && rows != 0; --head, --rows) {
    put_one();
  }
  const bool streaming = sink.streams();
  for (; rows >= kStep; rows -= kStep) {
    sink.put_line(make_line<From, To>(from, stride, overflowed), streaming);
    from += kStep * stride;
  }
  for (; rows != 0; --rows) {
    put_one();
  }
}

template <class From, class To>
void copy_rows(const Copy2d& copy, bool may_stream, Words& overflowed) {
  if (copy.rows == 0 || copy.row_elements == 0) {
    return;  // there may be no memory at all
  }
  Sink sink(copy, may_stream);
  if (copy.source_stride_bytes == copy.row_elements * sizeof(From)) {
    copy_row<From, To>(copy.source, copy.rows * copy.row_elements, sink, overflowed);
  } else if (copy.row_elements == kPieceElements) {
    copy_pieces<From, To>(copy, sink, overflowed);
  } else {
    for (std::size_t row = 0; row < copy.rows; ++row) {
      copy_row<From, To>(copy.source + row * copy.source_stride_bytes, copy.row_elements, sink,
                         overflowed);
    }
  }
}

template <class From, class To>
bool copy_all(const Copy2d* copies, std::size_t count) {
  std::size_t output_bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    output_bytes += copies[i].rows * copies[i].row_elements * sizeof(To);
  }
  const bool may_stream = output_bytes >= kMinStreamedBytes;
  Words overflowed = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; ++i) {
    copy_rows<From, To>(copies[i], may_stream, overflowed);
  }
  return _mm256_testz_si256(overflowed, overflowed) != 0;
}

template <class From>
CopyKernel kernel_from(Dtype target_dtype) {
  switch (target_dtype) {
    case Dtype::float32:
      return copy_all<From, float>;
    case Dtype::float16:
      return copy_all<From, Float16>;
    case Dtype::bfloat16:
      return copy_all<From, Bfloat16>;
  }
  return nullptr;
}

}  // namespace

CopyKernel avx2_copy_kernel(Dtype source_dtype, Dtype target_dtype) {
  switch (source_dtype) {
    case Dtype::float32:
      return kernel_from<float>(target_dtype);
    case Dtype::float16:
      return kernel_from<Float16>(target_dtype);
    case Dtype::bfloat16:
      return kernel_from<Bfloat16>(target_dtype);
  }
  return nullptr;
}

}  // namespace pagedlora::internal

#endif  // PAGEDLORA_HAVE_AVX2
