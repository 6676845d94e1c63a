#include "pagedlora/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "internal/json_cursor.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::JsonCursor;
using internal::JsonError;

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMaxDimensions = 8;
constexpr std::uint64_t kMaxInteger = std::numeric_limits<std::int64_t>::max();

struct KnownDtype {
  std::string_view name;
  std::uint64_t bytes;  // 0: elements are smaller than a byte
};

// What the safetensors library 0.8 knows.
constexpr std::array kKnownDtypes{
    KnownDtype{"BOOL", 1},    KnownDtype{"U8", 1},          KnownDtype{"I8", 1},
    KnownDtype{"F8_E5M2", 1}, KnownDtype{"F8_E4M3", 1},     KnownDtype{"F8_E8M0", 1},
    KnownDtype{"I16", 2},     KnownDtype{"F8_E4M3FNUZ", 1}, KnownDtype{"F8_E5M2FNUZ", 1},
    KnownDtype{"U16", 2},     KnownDtype{"F16", 2},         KnownDtype{"BF16", 2},
    KnownDtype{"I32", 4},     KnownDtype{"U32", 4},         KnownDtype{"F32", 4},
    KnownDtype{"C64", 8},     KnownDtype{"F64", 8},         KnownDtype{"I64", 8},
    KnownDtype{"U64", 8},     KnownDtype{"F4", 0},          KnownDtype{"F6_E2M3", 0},
    KnownDtype{"F6_E3M2", 0}};

std::string clipped(const std::string& text) {
  constexpr std::size_t kShown = 20;
  const bool is_plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
  return text.size() <= kShown && is_plain ? " '" + text + "'" : "";
}

class HeaderParser {
 public:
  HeaderParser(std::string_view json, std::uint64_t file_bytes, const std::string& source_name)
      : cursor_(json),
        data_start_(kLengthBytes + json.size()),
        file_bytes_(file_bytes),
        source_name_(source_name) {}

  std::vector<TensorHeader> parse() {
    try {
      cursor_.take_object([this] { read_member(); });
      cursor_.expect_end();
    } catch (const JsonError& error) {
      fail(current_, std::string("the header is not valid: ") + error.what() + " of it");
    }
    check_names();
    check_ranges();
    return std::move(tensors_);
  }

 private:
  using Range = std::pair<std::uint64_t, std::uint64_t>;

  void read_member() {
    std::string name = cursor_.take_string();
    cursor_.expect(':');
    if (name == "__metadata__") {
      read_metadata();
      return;
    }
    current_ = std::move(name);
    if (tensors_.size() == kMaxTensors) {
      fail("", "it has more than " + std::to_string(kMaxTensors) + " tensors");
    }
    read_tensor();
    current_.clear();
  }

  void read_metadata() {
    if (std::exchange(has_metadata_, true)) {
      cursor_.fail("a second \"__metadata__\"");
    }
    cursor_.take_object([this] {
      cursor_.skip_string();
      cursor_.expect(':');
      cursor_.skip_string();
    });
  }

  void read_tensor() {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<Range> offsets;
    cursor_.take_object([&] {
      const std::string key = cursor_.take_string();
      cursor_.expect(':');
      if (key == "dtype" && !dtype) {
        dtype = cursor_.take_string();
      } else if (key == "shape" && !shape) {
        shape = read_shape();
      } else if (key == "data_offsets" && !offsets) {
        offsets = read_offsets();
      } else {
        cursor_.fail(
            "a repeated or unknown key; \"dtype\", \"shape\" and \"data_offsets\" are allowed, "
            "once each");
      }
    });
    if (!dtype || !shape || !offsets) {
      fail(current_, "\"dtype\", \"shape\" or \"data_offsets\" is missing");
    }
    check_size(*dtype, *shape, *offsets);
    tensors_.push_back({.name = current_,
                        .dtype = *std::move(dtype),
                        .shape = *std::move(shape),
                        .offset = data_start_ + offsets->first,
                        .num_bytes = offsets->second - offsets->first});
  }

  std::vector<std::int64_t> read_shape() {
    std::vector<std::int64_t> shape;
    cursor_.take_array([&] {
      if (shape.size() == kMaxDimensions) {
        fail(current_, "it has more than " + std::to_string(kMaxDimensions) + " dimensions");
      }
      shape.push_back(static_cast<std::int64_t>(cursor_.take_integer(kMaxInteger)));
    });
    return shape;
  }

  Range read_offsets() {
    cursor_.expect('[');
    const std::uint64_t begin = cursor_.take_integer(kMaxInteger);
    cursor_.expect(',');
    const std::uint64_t end = cursor_.take_integer(kMaxInteger);
    cursor_.expect(']');
    return {begin, end};
  }

  void check_size(const std::string& dtype, const std::vector<std::int64_t>& shape,
                  const Range& offsets) const {
    const auto [begin, end] = offsets;
    if (begin > end) {
      fail(current_, "its data ends at " + std::to_string(end) + ", before it begins at " +
                         std::to_string(begin));
    }
    if (end > file_bytes_ - data_start_) {
      fail(current_, "its data ends at byte " + std::to_string(end) +
                         " of the data section, which has " +
                         std::to_string(file_bytes_ - data_start_));
    }
    const std::uint64_t expected = shape_bytes(shape, element_bytes_of(dtype));
    if (expected != end - begin) {
      fail(current_, "its shape and dtype need " + std::to_string(expected) +
                         " bytes, its offsets give " + std::to_string(end - begin));
    }
  }

  std::uint64_t element_bytes_of(const std::string& dtype) const {
    const auto* known = std::find_if(kKnownDtypes.begin(), kKnownDtypes.end(),
                                     [&](const KnownDtype& each) { return each.name == dtype; });
    if (known == kKnownDtypes.end()) {
      fail(current_, "unknown dtype" + clipped(dtype));
    }
    if (known->bytes == 0) {
      fail(current_,
           "dtype '" + dtype + "' packs several elements into a byte, which is not supported");
    }
    return known->bytes;
  }

  // Dimensions of 0 do not excuse the others: whoever multiplies some of them is safe, too.
  std::uint64_t shape_bytes(const std::vector<std::int64_t>& shape, std::uint64_t bytes) const {
    bool is_empty = false;
    for (const std::int64_t dimension : shape) {
      const auto factor = static_cast<std::uint64_t>(dimension);
      if (factor == 0) {
        is_empty = true;
      } else if (bytes > kMaxInteger / factor) {
        fail(current_, "the product of its shape overflows");
      } else {
        bytes *= factor;
      }
    }
    return is_empty ? 0 : bytes;
  }

  void check_names() const {
    std::vector<std::string_view> names(tensors_.size());
    std::transform(tensors_.begin(), tensors_.end(), names.begin(),
                   [](const TensorHeader& tensor) { return std::string_view(tensor.name); });
    std::sort(names.begin(), names.end());
    const auto twin = std::adjacent_find(names.begin(), names.end());
    if (twin != names.end()) {
      fail(std::string(*twin), "its name occurs twice");
    }
  }

  // Sorts the tensors by offset; they must then follow each other to the end of the file.
  void check_ranges() {
    std::stable_sort(
        tensors_.begin(), tensors_.end(), [](const TensorHeader& left, const TensorHeader& right) {
          return std::pair(left.offset, left.num_bytes) < std::pair(right.offset, right.num_bytes);
        });
    std::uint64_t end = data_start_;
    for (const TensorHeader& tensor : tensors_) {
      if (tensor.offset < end) {
        fail(tensor.name, "its data overlaps that of another tensor");
      }
      if (tensor.offset > end) {
        fail(tensor.name, "the " + std::to_string(tensor.offset - end) +
                              " bytes before its data belong to no tensor");
      }
      end += tensor.num_bytes;
    }
    if (end != file_bytes_) {
      fail("", "the last " + std::to_string(file_bytes_ - end) +
                   " bytes of the file belong to no tensor");
    }
  }

  [[noreturn]] void fail(const std::string& tensor, const std::string& problem) const {
    throw AdapterFormatError(source_name_, tensor, problem);
  }

  JsonCursor cursor_;
  const std::uint64_t data_start_;  // at most file_bytes_
  const std::uint64_t file_bytes_;
  const std::string& source_name_;
  std::string current_;  // the tensor being read, for messages; empty between tensors
  bool has_metadata_ = false;
  std::vector<TensorHeader> tensors_;
};

void check_header_length(std::uint64_t header_bytes, std::uint64_t file_bytes,
                         const std::string& source_name) {
  if (header_bytes > kMaxHeaderBytes) {
    throw AdapterFormatError(source_name, "",
                             "its header of " + std::to_string(header_bytes) +
                                 " bytes is over the limit of " + std::to_string(kMaxHeaderBytes));
  }
  if (file_bytes < kLengthBytes || header_bytes > file_bytes - kLengthBytes) {
    throw AdapterFormatError(source_name, "",
                             "its header of " + std::to_string(header_bytes) +
                                 " bytes does not fit the file of " + std::to_string(file_bytes));
  }
}

std::uint64_t little_endian(const std::array<std::byte, kLengthBytes>& bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) {
    value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  }
  return value;
}

}  // namespace

std::vector<TensorHeader> parse_safetensors_header(std::string_view json, std::uint64_t file_bytes,
                                                   const std::string& source_name) {
  check_header_length(json.size(), file_bytes, source_name);
  const std::size_t invalid = internal::find_invalid_utf8(json);
  if (invalid != std::string_view::npos) {
    throw AdapterFormatError(source_name, "",
                             "its header is not valid UTF-8, at byte " + std::to_string(invalid));
  }
  if (!json.starts_with('{')) {
    throw AdapterFormatError(source_name, "", "its header does not start with '{'");
  }
  return HeaderParser(json, file_bytes, source_name).parse();
}

std::vector<TensorHeader> read_safetensors_header(const TensorSource& source) {
  const std::string& name = source.description();
  const std::uint64_t file_bytes = source.size_bytes();
  if (file_bytes < kLengthBytes) {
    throw AdapterFormatError(
        name, "",
        "it has " + std::to_string(file_bytes) + " bytes; a safetensors file has at least 8");
  }
  const std::unique_ptr<SourceReader> reader = source.open();
  std::array<std::byte, kLengthBytes> length_bytes;
  reader->read(0, length_bytes);
  const std::uint64_t header_bytes = little_endian(length_bytes);
  check_header_length(header_bytes, file_bytes, name);
  std::string json(header_bytes, '\0');
  reader->read(kLengthBytes, std::as_writable_bytes(std::span(json)));
  reader->finish();  // before parsing: a file that changed is not malformed
  return parse_safetensors_header(json, file_bytes, name);
}

}  // namespace pagedlora
