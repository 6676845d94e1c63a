#include "pagedlora/adapter_root.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <system_error>
#include <utility>

#include "internal/file_descriptor.h"
#include "internal/printable.h"
#include "internal/regular_file.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::FileDescriptor;
using internal::throw_system_error;

// As the kernel's header has them; older systems lack it.
struct OpenHow {
  std::uint64_t flags = 0;
  std::uint64_t mode = 0;
  std::uint64_t resolve = 0;
};
constexpr long kOpenat2 = 437;
constexpr std::uint64_t kResolveNoMagicLinks = 0x02;
constexpr std::uint64_t kResolveBeneath = 0x08;

// The kernel's own bound.
constexpr int kMaxLinks = 40;

// Without empty components and ".", which mean nothing.
std::vector<std::string> split(std::string_view path) {
  std::vector<std::string> components;
  while (!path.empty()) {
    const std::size_t length = std::min(path.find('/'), path.size());
    const std::string_view component = path.substr(0, length);
    if (!component.empty() && component != ".") {
      components.emplace_back(component);
    }
    path.remove_prefix(std::min(length + 1, path.size()));
  }
  return components;
}

std::string join(const std::vector<std::string>& components) {
  std::string path;
  for (const std::string& component : components) {
    path += (path.empty() ? "" : "/") + component;
  }
  return path.empty() ? "." : path;
}

bool begins_with(const std::vector<std::string>& path, const std::vector<std::string>& prefix) {
  return path.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), path.begin());
}

// A descriptor, or -1: the kernel has no such call, a filter forbids it, or it refuses the path.
int open_by_kernel(int directory, const std::string& path, int flags) {
  OpenHow how{.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC),
              .resolve = kResolveBeneath | kResolveNoMagicLinks};
  return static_cast<int>(::syscall(kOpenat2, directory, path.c_str(), &how, sizeof(how)));
}

std::string target_of_link(int link, const std::string& path) {
  std::array<char, PATH_MAX> target{};
  const ssize_t length = ::readlinkat(link, "", target.data(), target.size());
  if (length < 0) {
    throw_system_error(path, errno);
  }
  return {target.data(), static_cast<std::size_t>(length)};
}

mode_t mode_of(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw_system_error(path, errno);
  }
  return status.st_mode;
}

}  // namespace

AdapterRoot::AdapterRoot(const std::string& directory, Resolver resolver) : resolver_(resolver) {
  std::error_code error;
  path_ = std::filesystem::absolute(directory, error).string();
  if (error || directory.empty() || directory.find('\0') != std::string::npos) {
    throw AdapterNotFoundError(directory);
  }
  descriptor_ = ::open(path_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) {
    throw_system_error(path_, errno);
  }
  const std::filesystem::path real = std::filesystem::canonical(path_, error);
  given_ = split(path_);
  real_ = error ? given_ : split(real.string());
}

AdapterRoot::~AdapterRoot() { ::close(descriptor_); }

bool AdapterRoot::find_below(std::string_view path, Components& below) const {
  below = split(path);
  if (path.empty() || path.front() != '/') {
    return true;
  }
  for (const Components* prefix : {&given_, &real_}) {
    if (begins_with(below, *prefix)) {
      below.erase(below.begin(), below.begin() + static_cast<std::ptrdiff_t>(prefix->size()));
      return true;
    }
  }
  return false;
}

// Follows a path below the root. Each component is opened without following links, and a link is
// read from the very descriptor that was found to be one. ".." goes back to the descriptor that the
// walk came from.
class AdapterRoot::Walk {
 public:
  Walk(const AdapterRoot& root, const std::string& path, const Components& below)
      : root_(root), path_(path), left_(below.begin(), below.end()) {}

  int open(int flags) {
    while (true) {
      const std::string name = next();
      if (name == "..") {
        leave();
        continue;
      }
      FileDescriptor entry(::openat(directory(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
      if (entry.get() < 0) {
        throw_system_error(path_, errno);
      }
      const mode_t mode = mode_of(entry.get(), path_);
      if (S_ISLNK(mode)) {
        follow(entry.get(), name);
      } else if (!left_.empty()) {
        enter(std::move(entry), mode);
      } else if ((flags & O_PATH) != 0) {
        return entry.release();
      } else if (const int fd = open_last(name, flags); fd >= 0) {
        return fd;
      }
    }
  }

 private:
  std::string next() {
    if (left_.empty()) {
      return ".";
    }
    std::string name = std::move(left_.front());
    left_.pop_front();
    return name;
  }

  int directory() const { return entered_.empty() ? root_.descriptor_ : entered_.back().get(); }

  void enter(FileDescriptor entry, mode_t mode) {
    if (!S_ISDIR(mode)) {
      throw_system_error(path_, ENOTDIR);
    }
    entered_.push_back(std::move(entry));
  }

  void leave() {
    if (entered_.empty()) {
      throw AdapterPathError(path_, root_.path_, "leaves it by '..'");
    }
    entered_.pop_back();
  }

  void follow(int link, const std::string& name) {
    look_again();
    const std::string target = target_of_link(link, path_);
    Components rest;
    if (!root_.find_below(target, rest)) {
      throw AdapterPathError(path_, root_.path_,
                             "leaves it by the symbolic link " + internal::in_quotes(name));
    }
    if (target.starts_with('/')) {
      entered_.clear();
    }
    left_.insert(left_.begin(), rest.begin(), rest.end());
  }

  // -1: it has become a link meanwhile, and is looked at again.
  int open_last(const std::string& name, int flags) {
    const int fd = ::openat(directory(), name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno != ELOOP) {
      throw_system_error(path_, errno);
    }
    if (fd < 0) {
      look_again();
      left_.push_front(name);
    }
    return fd;
  }

  void look_again() {
    if (++num_links_ > kMaxLinks) {
      throw AdapterReadError(path_, ELOOP);
    }
  }

  const AdapterRoot& root_;
  const std::string& path_;
  std::deque<std::string> left_;
  std::vector<FileDescriptor> entered_;
  int num_links_ = 0;
};

int AdapterRoot::open(const std::string& path, int flags) const {
  if (path.find('\0') != std::string::npos) {
    throw AdapterPathError(path, path_, "contains a zero byte");
  }
  Components below;
  if (!find_below(path, below)) {
    throw AdapterPathError(path, path_, "lies elsewhere");
  }
  if (resolver_ == Resolver::kKernelFirst) {
    const int fd = open_by_kernel(descriptor_, join(below), flags);
    if (fd >= 0) {
      return fd;
    }
  }
  return Walk(*this, path, below).open(flags);
}

bool AdapterRoot::was_replaced() const noexcept {
  struct stat mine{};
  struct stat named{};
  return ::fstat(descriptor_, &mine) == 0 && ::stat(path_.c_str(), &named) == 0 &&
         (mine.st_dev != named.st_dev || mine.st_ino != named.st_ino);
}

void AdapterRoot::check(const std::string& path) const {
  const FileDescriptor found(open(path, O_PATH));
}

int open_adapter_file(const std::string& path, const AdapterRoot* root) {
  return internal::open_regular_file(path, root, internal::refuse_as_format_error(path))
      .fd.release();
}

}  // namespace pagedlora
