// A forward-only reader of strict JSON (RFC 8259) that never recurses and never allocates more than
// the text it has read: the caller says what must come next, anything else is an error.
//
// Thread-compatible. The text must outlive the cursor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pagedlora::internal {

class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& problem, std::size_t byte)
      : std::runtime_error(problem + ", at byte " + std::to_string(byte)) {}
};

// Position of the first byte that is not well-formed UTF-8, or npos.
std::size_t find_invalid_utf8(std::string_view text);

// Every function skips the whitespace before what it reads, and throws JsonError if that is not
// what comes next; the cursor is then of no more use.
class JsonCursor {
 public:
  // `text` must be valid UTF-8.
  explicit JsonCursor(std::string_view text) : text_(text) {}

  void expect(char punctuation);
  bool try_take(char punctuation);
  void expect_end();

  // A string with its escapes resolved, as UTF-8.
  std::string take_string();
  void skip_string();

  // An integer from 0 to `most`, without sign, fraction or exponent.
  std::uint64_t take_integer(std::uint64_t most);

  // Calls `member()` before each member of an object or element of an array; it reads the whole
  // member.
  template <class Member>
  void take_object(Member&& member) {
    take_list('{', '}', member);
  }
  template <class Element>
  void take_array(Element&& element) {
    take_list('[', ']', element);
  }

  [[noreturn]] void fail(const std::string& problem) const { throw JsonError(problem, position_); }

 private:
  template <class Item>
  void take_list(char open, char close, Item&& item) {
    expect(open);
    if (try_take(close)) {
      return;
    }
    do {
      item();
    } while (try_take(','));
    expect(close);
  }

  bool at_end() const { return position_ == text_.size(); }
  void skip_whitespace();
  void scan_string(std::string* into);
  void scan_escape(std::string* into);
  std::uint32_t scan_code_point();
  std::uint32_t scan_four_hex_digits();

  std::string_view text_;
  std::size_t position_ = 0;
};

}  // namespace pagedlora::internal
