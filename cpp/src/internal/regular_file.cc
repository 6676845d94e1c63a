#include "internal/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

std::string kind_of_file(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return "a regular file";
    case S_IFDIR:
      return "a directory";
    case S_IFIFO:
      return "a FIFO";
    case S_IFSOCK:
      return "a socket";
    default:
      return "a device";
  }
}

std::int64_t nanoseconds(const timespec& time) {
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileIdentity identity_of(const struct stat& status) {
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .size_bytes = static_cast<std::uint64_t>(status.st_size),
          .mtime_ns = nanoseconds(status.st_mtim),
          .ctime_ns = nanoseconds(status.st_ctim)};
}

struct stat status_of_fd(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw AdapterReadError(path, errno);
  }
  return status;
}

FileDescriptor open_path(const std::string& path, const AdapterRoot* root, int flags) {
  if (root != nullptr) {
    return FileDescriptor(root->open(path, flags));
  }
  if (path.find('\0') != std::string::npos) {
    throw AdapterNotFoundError(path);
  }
  FileDescriptor fd(::open(path.c_str(), flags | O_CLOEXEC));
  if (fd.get() < 0) {
    throw_system_error(path, errno);
  }
  return fd;
}

}  // namespace

void throw_system_error(const std::string& path, int error_number) {
  if (error_number == ENOENT || error_number == ENOTDIR) {
    throw AdapterNotFoundError(path);
  }
  throw AdapterReadError(path, error_number);
}

FileIdentity identity_of_fd(int fd, const std::string& path) {
  return identity_of(status_of_fd(fd, path));
}

// The first look spares devices the side effects of being opened; O_NONBLOCK and the second cover a
// swap in between.
OpenFile open_regular_file(const std::string& path, const AdapterRoot* root, const Refuse& refuse) {
  {
    const FileDescriptor look = open_path(path, root, O_PATH);
    const struct stat before = status_of_fd(look.get(), path);
    if (!S_ISREG(before.st_mode)) {
      refuse(kind_of_file(before.st_mode));
    }
  }
  FileDescriptor fd = open_path(path, root, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  const struct stat opened = status_of_fd(fd.get(), path);
  if (!S_ISREG(opened.st_mode)) {
    refuse(kind_of_file(opened.st_mode));
  }
  return {std::move(fd), identity_of(opened)};
}

Refuse refuse_as_format_error(const std::string& path) {
  return [&path](const std::string& kind) {
    throw AdapterFormatError(path, "", "is " + kind + ", not a regular file");
  };
}

}  // namespace pagedlora::internal
