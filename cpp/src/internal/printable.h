// Foreign texts in messages: names, paths and what files say may hold line ends, terminal controls
// or bytes that are no UTF-8, and may be of any length.
//
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pagedlora::internal {

// The text as one line of UTF-8: what does not print is escaped as \n, \x1b or \u202e. The middle
// of a text of more than `limit` bytes is left out, which are at least 16.
std::string printable(std::string_view text, std::size_t limit);

// A name or a path in quotes, of at most 200 bytes.
std::string in_quotes(std::string_view text);

}  // namespace pagedlora::internal
