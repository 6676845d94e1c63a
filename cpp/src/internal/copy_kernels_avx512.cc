// Compiled with AVX-512 flags, so nothing shared may be instantiated here: every helper is in the
// anonymous namespace and no inline function of our headers or of std is called, or the linker
// could keep this file's copy for callers on processors without AVX-512.
#if defined(PAGEDLORA_HAVE_AVX512)

// g++ 12 takes the intrinsics' own undefined registers for a mistake of the caller (GCC bug
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "internal/copy_kernels.h"

namespace pagedlora::internal {
namespace {

constexpr std::size_t kLineBytes = 64;
// Rows of this many elements, taken from wider ones, are what a rank block's B matrix consists of.
constexpr std::size_t kPieceElements = 8;

// Below this much output, waiting for streaming stores to finish costs more than they save.
constexpr std::size_t kMinStreamedBytes = 4096;

template <Dtype kDtype>
constexpr std::size_t kBytes = kDtype == Dtype::float32 ? 4 : 2;

template <Dtype kDtype>
constexpr std::size_t kLineElements = kLineBytes / kBytes<kDtype>;

__mmask64 first_bytes(std::size_t count) {
  return count >= kLineBytes ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

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

  void put_line(__m512i line, bool streaming) {
    store_line(target_, line, streaming);
    if (second_ != nullptr) {
      store_line(second_, line, streaming);
    }
    advance(kLineBytes);
  }

  // The first `num_bytes`, fewer than a line.
  void put_part(__m512i line, std::size_t num_bytes) {
    const __mmask64 mask = first_bytes(num_bytes);
    _mm512_mask_storeu_epi8(target_, mask, line);
    if (second_ != nullptr) {
      _mm512_mask_storeu_epi8(second_, mask, line);
    }
    advance(num_bytes);
  }

 private:
  static std::uintptr_t address(const std::byte* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }

  static void store_line(std::byte* into, __m512i line, bool streaming) {
    if (streaming) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(into), line);
    } else {
      _mm512_storeu_si512(into, line);
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

__m128i load_128(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

__m256i load_256(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

__m256i join(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

__m512i join(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

__mmask16 first_16(std::size_t count) {
  return count >= 16 ? __mmask16{0xFFFF} : static_cast<__mmask16>((1U << count) - 1U);
}

__mmask16 is_nan(__m512i float32_bits) {
  const __m512i magnitude = _mm512_and_si512(float32_bits, _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
}

// Sixteen 2-byte values as the bits of float32. The conversion of float16 ignores
// MXCSR's flush modes, raises nothing and keeps a NaN a NaN.
template <Dtype kSource>
__m512i widen(__m256i values) {
  if constexpr (kSource == Dtype::bfloat16) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16);
  } else {
    return _mm512_castps_si512(_mm512_cvt_roundph_ps(values, _MM_FROUND_NO_EXC));
  }
}

// Sixteen consecutive values as the bits of float32; those not in `mask` are zero and not read.
template <Dtype kSource>
__m512i load_16(const std::byte* from, __mmask16 mask) {
  if constexpr (kSource == Dtype::float32) {
    return _mm512_maskz_loadu_epi32(mask, from);
  } else {
    return widen<kSource>(_mm256_maskz_loadu_epi16(mask, from));
  }
}

template <Dtype kSource>
__m512i load_16(const std::byte* from) {
  if constexpr (kSource == Dtype::float32) {
    return _mm512_loadu_si512(from);
  } else {
    return widen<kSource>(load_256(from));
  }
}

// Two pieces of eight values.
template <Dtype kSource>
__m512i load_pieces(const std::byte* first, const std::byte* second) {
  if constexpr (kSource == Dtype::float32) {
    return join(load_256(first), load_256(second));
  } else {
    return widen<kSource>(join(load_128(first), load_128(second)));
  }
}

__m256i narrow_bfloat16(__m512i bits) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i result = _mm512_mask_set1_epi32(rounded, is_nan(bits), 0x7FFFFFFF);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
}

__m256i narrow_float16(__m512i bits, __mmask16& overflowed) {
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(0x477FF000));
  overflowed |= _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32(0x7F800000 - 0x477FF000));
  const __m256i result = _mm512_cvt_roundps_ph(_mm512_castsi512_ps(bits),
                                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_mask_set1_epi16(result, is_nan(bits), 0x7FFF);
}

// One line of the target type from as many float32 as it holds; `high` is unused for float32.
template <Dtype kTarget>
__m512i narrow_line(__m512i low, __m512i high, __mmask16& overflowed) {
  if constexpr (kTarget == Dtype::float32) {
    return _mm512_mask_set1_epi32(low, is_nan(low), 0x7FFFFFFF);
  } else if constexpr (kTarget == Dtype::bfloat16) {
    return join(narrow_bfloat16(low), narrow_bfloat16(high));
  } else {
    return join(narrow_float16(low, overflowed), narrow_float16(high, overflowed));
  }
}

template <Dtype kSource, Dtype kTarget>
__m512i convert_line(const std::byte* from, __mmask16& overflowed) {
  if constexpr (kSource == kTarget) {
    return _mm512_loadu_si512(from);
  } else {
    const __m512i low = load_16<kSource>(from);
    const __m512i high =
        kTarget == Dtype::float32 ? low : load_16<kSource>(from + 16 * kBytes<kSource>);
    return narrow_line<kTarget>(low, high, overflowed);
  }
}

// The first `count` elements of a line; nothing beyond them is read.
template <Dtype kSource, Dtype kTarget>
__m512i convert_part(const std::byte* from, std::size_t count, __mmask16& overflowed) {
  if constexpr (kSource == kTarget) {
    return _mm512_maskz_loadu_epi8(first_bytes(count * kBytes<kSource>), from);
  } else {
    const __m512i low = load_16<kSource>(from, first_16(count));
    const __m512i high = count <= 16
                             ? _mm512_setzero_si512()
                             : load_16<kSource>(from + 16 * kBytes<kSource>, first_16(count - 16));
    return narrow_line<kTarget>(low, high, overflowed);
  }
}

// A line made of the eight-element pieces at `from`, `from + stride`, ...
template <Dtype kSource, Dtype kTarget>
__m512i convert_pieces(const std::byte* from, std::size_t stride, __mmask16& overflowed) {
  if constexpr (kSource == kTarget && kSource != Dtype::float32) {
    return join(join(load_128(from), load_128(from + stride)),
                join(load_128(from + 2 * stride), load_128(from + 3 * stride)));
  } else {
    const __m512i low = load_pieces<kSource>(from, from + stride);
    if constexpr (kSource == kTarget) {
      return low;
    } else if constexpr (kTarget == Dtype::float32) {
      return narrow_line<kTarget>(low, low, overflowed);
    } else {
      const __m512i high = load_pieces<kSource>(from + 2 * stride, from + 3 * stride);
      return narrow_line<kTarget>(low, high, overflowed);
    }
  }
}

template <Dtype kSource, Dtype kTarget>
void copy_row(const std::byte* from, std::size_t num_elements, Sink& sink, __mmask16& overflowed) {
  constexpr std::size_t kStep = kLineElements<kTarget>;
  const std::size_t head = sink.bytes_to_alignment() / kBytes<kTarget>;
  if (head != 0 && head < num_elements) {
    sink.put_part(convert_part<kSource, kTarget>(from, head, overflowed), head * kBytes<kTarget>);
    from += head * kBytes<kSource>;
    num_elements -= head;
  }
  const bool streaming = sink.streams();
  for (; num_elements >= kStep; num_elements -= kStep) {
    sink.put_line(convert_line<kSource, kTarget>(from, overflowed), streaming);
    from += kStep * kBytes<kSource>;
  }
  if (num_elements != 0) {
    sink.put_part(convert_part<kSource, kTarget>(from, num_elements, overflowed),
                  num_elements * kBytes<kTarget>);
  }
}

template <Dtype kSource, Dtype kTarget>
void copy_pieces(const Copy2d& copy, Sink& sink, __mmask16& overflowed) {
  constexpr std::size_t kPieceBytes = kPieceElements * kBytes<kTarget>;
  constexpr std::size_t kStep = kLineBytes / kPieceBytes;
  const std::size_t stride = copy.source_stride_bytes;
  const std::byte* from = copy.source;
  std::size_t rows = copy.rows;
  const auto put_one = [&] {
    sink.put_part(convert_part<kSource, kTarget>(from, kPieceElements, overflowed), kPieceBytes);
    from += stride;
  };
  std::size_t head = sink.bytes_to_alignment() / kPieceBytes;
  for (; head != 0 && rows != 0; --head, --rows) {
    put_one();
  }
  const bool streaming = sink.streams();
  for (; rows >= kStep; rows -= kStep) {
    sink.put_line(convert_pieces<kSource, kTarget>(from, stride, overflowed), streaming);
    from += kStep * stride;
  }
  for (; rows != 0; --rows) {
    put_one();
  }
}

template <Dtype kSource, Dtype kTarget>
void copy_rows(const Copy2d& copy, bool may_stream, __mmask16& overflowed) {
  Sink sink(copy, may_stream);
  if (copy.source_stride_bytes == copy.row_elements * kBytes<kSource>) {
    copy_row<kSource, kTarget>(copy.source, copy.rows * copy.row_elements, sink, overflowed);
  } else if (copy.row_elements == kPieceElements) {
    copy_pieces<kSource, kTarget>(copy, sink, overflowed);
  } else {
    for (std::size_t row = 0; row < copy.rows; ++row) {
      copy_row<kSource, kTarget>(copy.source + row * copy.source_stride_bytes, copy.row_elements,
                                 sink, overflowed);
    }
  }
}

template <Dtype kSource, Dtype kTarget>
bool copy_all(const Copy2d* copies, std::size_t count) {
  std::size_t output_bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    output_bytes += copies[i].rows * copies[i].row_elements * kBytes<kTarget>;
  }
  const bool may_stream = output_bytes >= kMinStreamedBytes;
  __mmask16 overflowed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    copy_rows<kSource, kTarget>(copies[i], may_stream, overflowed);
  }
  return overflowed == 0;
}

template <Dtype kSource>
CopyKernel kernel_from(Dtype target_dtype) {
  switch (target_dtype) {
    case Dtype::float32:
      return copy_all<kSource, Dtype::float32>;
    case Dtype::float16:
      return copy_all<kSource, Dtype::float16>;
    case Dtype::bfloat16:
      return copy_all<kSource, Dtype::bfloat16>;
  }
  return nullptr;
}

}  // namespace

CopyKernel avx512_copy_kernel(Dtype source_dtype, Dtype target_dtype) {
  switch (source_dtype) {
    case Dtype::float32:
      return kernel_from<Dtype::float32>(target_dtype);
    case Dtype::float16:
      return kernel_from<Dtype::float16>(target_dtype);
    case Dtype::bfloat16:
      return kernel_from<Dtype::bfloat16>(target_dtype);
  }
  return nullptr;
}

}  // namespace pagedlora::internal

#endif  // PAGEDLORA_HAVE_AVX512
