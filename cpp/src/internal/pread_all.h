// The loop around pread: until the buffer is full, the file ends or the system refuses.
//
// Pure but for the function it calls; thread-safe if that is.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pagedlora::internal {

struct ReadOutcome {
  std::size_t num_bytes = 0;  // fewer than asked for: end of file, or error_number says why not
  int error_number = 0;
};

// Linux moves no more than this in one call.
inline constexpr std::size_t kMaxReadBytes = 0x7FFFF000;

// `read_some(void* into, std::size_t num_bytes, std::uint64_t offset)` has pread's contract: it may
// return less than asked for, and fail with EINTR. May block.
template <class ReadSome>
ReadOutcome pread_all(ReadSome&& read_some, std::uint64_t offset, std::span<std::byte> into) {
  std::size_t done = 0;
  while (done < into.size()) {
    const std::size_t wanted = std::min(into.size() - done, kMaxReadBytes);
    const ssize_t got = read_some(into.data() + done, wanted, offset + done);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got == 0) {
      return {done, 0};
    } else if (errno != EINTR) {
      return {done, errno};
    }
  }
  return {done, 0};
}

}  // namespace pagedlora::internal
