// Opening a file that must be a regular one, anywhere or beneath an AdapterRoot.
//
// Functions; thread-safe.
#pragma once

#include <functional>
#include <string>

#include "internal/file_descriptor.h"
#include "pagedlora/adapter_root.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora::internal {

struct OpenFile {
  FileDescriptor fd;
  FileIdentity identity;
};

// What a failed system call on a path means: AdapterNotFoundError or AdapterReadError.
[[noreturn]] void throw_system_error(const std::string& path, int error_number);

FileIdentity identity_of_fd(int fd, const std::string& path);

// Throws for something that is not a regular file; `kind` is "a directory" or the like.
using Refuse = std::function<void(const std::string& kind)>;

// Opens for reading, beneath `root` unless that is null. Throws what `refuse` throws,
// AdapterNotFoundError, AdapterReadError, and beneath a root AdapterPathError.
OpenFile open_regular_file(const std::string& path, const AdapterRoot* root, const Refuse& refuse);

// Throws AdapterFormatError. Refers to `path`.
Refuse refuse_as_format_error(const std::string& path);

}  // namespace pagedlora::internal
