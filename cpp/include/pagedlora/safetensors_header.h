// A bounded reader of safetensors headers: it never maps, never allocates by a number that the file
// chose, and refuses whatever the format's specification does not allow.
//
// File: 8 bytes little-endian header length n, n bytes of JSON, then the data section. Each entry
// of the JSON object is {"dtype", "shape", "data_offsets": [begin, end]} with offsets relative to
// the data section; "__metadata__" maps strings to strings and is skipped.
//
// Refused with AdapterFormatError: a file under 8 bytes, a header over kMaxHeaderBytes or longer
// than the file, JSON that is not exactly such an object, nesting beyond it, duplicate names,
// unknown dtypes, more than kMaxTensors tensors, more than 8 dimensions, shapes whose product
// overflows, byte counts that disagree with the shape, ranges that overlap, leave holes or do not
// end at the end of the file, invalid UTF-8.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedlora/tensor_source.h"

namespace pagedlora {

struct TensorHeader {
  std::string name;
  std::string dtype;  // as the file spells it: "F32", "BF16", ...
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // from the start of the file
  std::uint64_t num_bytes = 0;
};

inline constexpr std::uint64_t kMaxHeaderBytes = 16U << 20;
inline constexpr std::size_t kMaxTensors = 100'000;

// `source_name` goes into error messages. `file_bytes` is the size of the whole file. Tensors come
// in order of their offset.
std::vector<TensorHeader> parse_safetensors_header(std::string_view json, std::uint64_t file_bytes,
                                                   const std::string& source_name);

// Reads and parses the header of a whole source.
std::vector<TensorHeader> read_safetensors_header(const TensorSource& source);

}  // namespace pagedlora
