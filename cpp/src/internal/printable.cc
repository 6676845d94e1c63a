#include "internal/printable.h"

#include <array>
#include <cstdint>

namespace pagedlora::internal {
namespace {

constexpr std::size_t kQuotedBytes = 200;
constexpr std::string_view kCut = " ... ";

struct Character {
  std::size_t bytes = 1;
  std::uint32_t code = 0;
  bool is_valid = false;
};

constexpr bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// The character at the beginning of a text that is not empty; a single byte if that is none.
Character first_of(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) {
    return {.bytes = 1, .code = lead, .is_valid = true};
  }
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) {
    return {.bytes = 1, .code = lead};
  }
  std::uint32_t code = lead & (0x7FU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if (!continues(text[i])) {
      return {.bytes = 1, .code = lead};
    }
    code = (code << 6U) | (static_cast<unsigned char>(text[i]) & 0x3FU);
  }
  constexpr std::array<std::uint32_t, 5> least = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  if (code < least[bytes] || code > 0x10FFFF || is_surrogate) {
    return {.bytes = 1, .code = lead};
  }
  return {.bytes = bytes, .code = code, .is_valid = true};
}

// Controls, and what ends lines or turns the direction of writing.
constexpr bool prints(std::uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool is_mark = code == 0x061C || (code >= 0x200B && code <= 0x200F) ||
                       (code >= 0x2028 && code <= 0x202E) || (code >= 0x2060 && code <= 0x206F) ||
                       code == 0xFEFF;
  return !is_control && !is_mark;
}

void add_escaped(std::string& line, const Character& character) {
  constexpr std::string_view digits = "0123456789abcdef";
  const std::uint32_t code = character.code;
  const auto digit = [&](unsigned shift) { return digits[(code >> shift) & 0xFU]; };
  switch (code) {
    case '\n':
      line += "\\n";
      return;
    case '\r':
      line += "\\r";
      return;
    case '\t':
      line += "\\t";
      return;
    default:
      break;
  }
  if (code < 0x100) {
    line.append("\\x") += digit(4);
  } else {
    line.append("\\u") += digit(12);
    (line += digit(8)) += digit(4);
  }
  line += digit(0);
}

// Both ends of a text that is too long, cut between characters where it is UTF-8.
std::string shortened(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) {
    return std::string(text);
  }
  std::size_t head = (limit - kCut.size() + 1) / 2;
  std::size_t tail = text.size() - (limit - kCut.size()) / 2;
  for (int i = 0; i < 3 && head > 0 && continues(text[head]); ++i) {
    --head;
  }
  for (int i = 0; i < 3 && tail < text.size() && continues(text[tail]); ++i) {
    ++tail;
  }
  return std::string(text.substr(0, head)).append(kCut).append(text.substr(tail));
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  const std::string bounded = shortened(text, limit);
  std::string line;
  line.reserve(bounded.size());
  for (std::string_view rest = bounded; !rest.empty();) {
    const Character character = first_of(rest);
    if (character.is_valid && prints(character.code)) {
      line.append(rest.substr(0, character.bytes));
    } else {
      add_escaped(line, character);
    }
    rest.remove_prefix(character.bytes);
  }
  return shortened(line, limit);
}

std::string in_quotes(std::string_view text) { return "'" + printable(text, kQuotedBytes) + "'"; }

}  // namespace pagedlora::internal
