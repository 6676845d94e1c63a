#include "internal/json_cursor.h"

namespace pagedlora::internal {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// How a sequence that starts with `lead` continues: its length, and the range of its second byte,
// which excludes overlong forms, surrogates and what lies beyond U+10FFFF (Unicode, table 3-7).
struct Utf8Form {
  std::size_t length = 0;  // 0: not a lead byte
  unsigned char second_from = 0x80;
  unsigned char second_to = 0xBF;
};

Utf8Form utf8_form(unsigned char lead) {
  if (lead < 0x80) {
    return {.length = 1};
  }
  if (lead >= 0xC2 && lead <= 0xDF) {
    return {.length = 2};
  }
  if (lead >= 0xE0 && lead <= 0xEF) {
    return {.length = 3,
            .second_from = static_cast<unsigned char>(lead == 0xE0 ? 0xA0 : 0x80),
            .second_to = static_cast<unsigned char>(lead == 0xED ? 0x9F : 0xBF)};
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    return {.length = 4,
            .second_from = static_cast<unsigned char>(lead == 0xF0 ? 0x90 : 0x80),
            .second_to = static_cast<unsigned char>(lead == 0xF4 ? 0x8F : 0xBF)};
  }
  return {};
}

void append_utf8(std::uint32_t code, std::string& text) {
  const auto put = [&text](std::uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

}  // namespace

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t start = 0;
  while (start < text.size()) {
    const Utf8Form form = utf8_form(static_cast<unsigned char>(text[start]));
    if (form.length == 0 || form.length > text.size() - start) {
      return start;
    }
    for (std::size_t i = 1; i < form.length; ++i) {
      const auto byte = static_cast<unsigned char>(text[start + i]);
      if (byte < (i == 1 ? form.second_from : 0x80) || byte > (i == 1 ? form.second_to : 0xBF)) {
        return start;
      }
    }
    start += form.length;
  }
  return std::string_view::npos;
}

void JsonCursor::skip_whitespace() {
  while (!at_end() && (text_[position_] == ' ' || text_[position_] == '\n' ||
                       text_[position_] == '\r' || text_[position_] == '\t')) {
    ++position_;
  }
}

bool JsonCursor::try_take(char punctuation) {
  skip_whitespace();
  if (at_end() || text_[position_] != punctuation) {
    return false;
  }
  ++position_;
  return true;
}

void JsonCursor::expect(char punctuation) {
  if (!try_take(punctuation)) {
    fail(std::string("expected '") + punctuation + "'");
  }
}

void JsonCursor::expect_end() {
  skip_whitespace();
  if (!at_end()) {
    fail("something follows the JSON object");
  }
}

std::string JsonCursor::take_string() {
  std::string result;
  scan_string(&result);
  return result;
}

void JsonCursor::skip_string() { scan_string(nullptr); }

void JsonCursor::scan_string(std::string* into) {
  if (!try_take('"')) {
    fail("expected a string");
  }
  while (!at_end()) {
    const char c = text_[position_];
    if (c == '"') {
      ++position_;
      return;
    }
    if (static_cast<unsigned char>(c) < 0x20) {
      fail("a string contains a control character");
    }
    ++position_;
    if (c == '\\') {
      scan_escape(into);
    } else if (into != nullptr) {
      into->push_back(c);
    }
  }
  fail("a string has no end");
}

void JsonCursor::scan_escape(std::string* into) {
  static constexpr std::string_view kEscapes = "\"\\/bfnrt";
  static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  if (at_end()) {
    fail("a string has no end");
  }
  const char c = text_[position_++];
  if (c == 'u') {
    const std::uint32_t code = scan_code_point();
    if (into != nullptr) {
      append_utf8(code, *into);
    }
    return;
  }
  const std::size_t index = kEscapes.find(c);
  if (index == std::string_view::npos) {
    fail("a string contains an unknown escape");
  }
  if (into != nullptr) {
    into->push_back(kMeanings[index]);
  }
}

std::uint32_t JsonCursor::scan_code_point() {
  const std::uint32_t first = scan_four_hex_digits();
  if (first < 0xD800 || first > 0xDFFF) {
    return first;
  }
  if (first > 0xDBFF || text_.substr(position_, 2) != "\\u") {
    fail("a string contains half of a surrogate pair");
  }
  position_ += 2;
  const std::uint32_t second = scan_four_hex_digits();
  if (second < 0xDC00 || second > 0xDFFF) {
    fail("a string contains half of a surrogate pair");
  }
  return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
}

std::uint32_t JsonCursor::scan_four_hex_digits() {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = at_end() ? '\0' : text_[position_];
    if (is_digit(c)) {
      value = value * 16 + static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      value = value * 16 + static_cast<std::uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      value = value * 16 + static_cast<std::uint32_t>(c - 'A' + 10);
    } else {
      fail("\\u is not followed by four hexadecimal digits");
    }
    ++position_;
  }
  return value;
}

std::uint64_t JsonCursor::take_integer(std::uint64_t most) {
  skip_whitespace();
  const std::size_t start = position_;
  std::uint64_t value = 0;
  while (!at_end() && is_digit(text_[position_])) {
    const auto digit = static_cast<std::uint64_t>(text_[position_] - '0');
    if (value > (most - digit) / 10) {
      fail("a number is larger than " + std::to_string(most));
    }
    value = value * 10 + digit;
    ++position_;
  }
  const std::size_t num_digits = position_ - start;
  if (num_digits == 0) {
    fail("expected an integer of at least 0");
  }
  if (num_digits > 1 && text_[start] == '0') {
    fail("a number starts with 0");
  }
  if (!at_end() &&
      (text_[position_] == '.' || text_[position_] == 'e' || text_[position_] == 'E')) {
    fail("a number is not an integer");
  }
  return value;
}

}  // namespace pagedlora::internal
