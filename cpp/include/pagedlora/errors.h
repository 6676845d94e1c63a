// Every failure a caller can meet, each with a stable code and the numbers behind it.
//
// Each type has a Python twin of the same name in pagedlora.errors, derived from the built-in a
// Python caller would expect; the bindings translate field by field. Messages say what is wrong,
// with which numbers, and what to change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "pagedlora/ids.h"

namespace pagedlora {

// What what() says is one printable line of UTF-8 and of bounded length, whatever names and paths
// are in it; fields have these as they are.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
};

// An argument that no state of the system would make valid.
class InvalidArgumentError : public Error {
 public:
  using Error::Error;
};

// The tier cannot hold the claim now. Nothing was changed; waiting may help.
class LoraCacheFullError : public Error {
 public:
  LoraCacheFullError(std::string tier, std::size_t needed_pages, std::size_t free_pages,
                     std::size_t evictable_pages);

  // Of a pin: beside `pinned_pages` and the adapter's own too few would be left of `total_pages` for
  // one of `largest_pages`. Free is what is not pinned.
  static LoraCacheFullError of_pin(std::string tier, std::size_t adapter_pages,
                                   std::size_t pinned_pages, std::size_t largest_pages,
                                   std::size_t total_pages);

  std::string tier;
  std::size_t needed_pages;
  std::size_t free_pages;
  std::size_t evictable_pages;

 private:
  LoraCacheFullError(const std::string& message, std::string tier, std::size_t needed_pages,
                     std::size_t free_pages, std::size_t evictable_pages);
};

// The adapter can never fit the tier, whatever is evicted.
class AdapterTooLargeError : public Error {
 public:
  AdapterTooLargeError(std::string tier, std::size_t needed_pages, std::size_t total_pages,
                       std::size_t page_bytes);

  std::string tier;
  std::size_t needed_pages;
  std::size_t total_pages;
  std::size_t page_bytes;
};

// A request names a task that has no source, and carries no weights for it; or a tier is asked for a task
// that it does not hold.
class PeftTaskNotCachedError : public Error {
 public:
  explicit PeftTaskNotCachedError(TaskId task);
  PeftTaskNotCachedError(TaskId task, const std::string& tier);

  TaskId task;
};

// A file is not what its format says. `tensor` is empty when the file as a whole is at fault.
class AdapterFormatError : public Error {
 public:
  AdapterFormatError(std::string path, std::string tensor, const std::string& problem);

  std::string path;
  std::string tensor;
};

// The file was replaced, truncated or written to since it was registered.
class AdapterSourceChangedError : public Error {
 public:
  AdapterSourceChangedError(std::string path, const std::string& difference);

  std::string path;
};

// There is no such file or directory.
class AdapterNotFoundError : public Error {
 public:
  explicit AdapterNotFoundError(std::string path);

  std::string path;
};

// The path is not one of a file in the AdapterRoot.
class AdapterPathError : public Error {
 public:
  // `problem` completes "the path ...".
  AdapterPathError(std::string path, std::string root, const std::string& problem);

  std::string path;
  std::string root;
};

// The operating system would not read the file.
class AdapterReadError : public Error {
 public:
  AdapterReadError(std::string path, int error_number);

  std::string path;
  int error_number;
};

// A task cannot be forgotten while somebody uses it.
class AdapterInUseError : public Error {
 public:
  AdapterInUseError(TaskId task, std::size_t num_owners, std::size_t num_pins, bool is_leased);

  TaskId task;
  std::size_t num_owners;
};

// A pool could not be allocated.
class OutOfMemoryError : public Error {
 public:
  OutOfMemoryError(std::string tier, std::size_t bytes);

  std::string tier;
  std::size_t bytes;
};

// There is no GPU that this process can use, or it has failed and cannot be used any more.
class GpuUnavailableError : public Error {
 public:
  // `reason` says what is missing or what failed, and is a sentence of its own.
  explicit GpuUnavailableError(std::string reason);

  std::string reason;
};

// A call to the GPU's runtime failed, and the GPU can still be used.
class GpuCallError : public Error {
 public:
  GpuCallError(std::string call, std::string error_name, const std::string& description);

  std::string call;
  std::string error_name;
};

// A source or a device did not answer in time. The load was given up; asking again starts it anew.
class AdapterLoadTimeout : public Error {
 public:
  // `stuck_readers`: how many earlier loads block every worker, so that this one was not begun.
  explicit AdapterLoadTimeout(double limit_seconds, std::size_t stuck_readers = 0);

  double limit_seconds;
  std::size_t stuck_readers;
};

// A live request was added again for another task, or with other weights.
class RequestConflictError : public Error {
 public:
  using Error::Error;
};

// A lease is asked for a request that it has no adapter of.
class RequestNotLeasedError : public Error {
 public:
  explicit RequestNotLeasedError(RequestId request);

  RequestId request;
};

// A lease, or what hangs on it, was used after close().
class LeaseClosedError : public Error {
 public:
  using Error::Error;
};

}  // namespace pagedlora
