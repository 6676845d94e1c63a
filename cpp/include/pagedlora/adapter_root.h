// A directory that adapters' files must lie in, whoever names or links them.
//
// For sources that come from people who must not make this process read other files: every file is
// opened beneath a descriptor of the directory, so a link or directory that is swapped between a
// check and the open changes nothing: there is no check apart from the open.
//
// Symbolic links may lie in the directory as long as they lead to something in it. Hard links and
// mounts in it count as being in it. The directory itself is the one that was there at
// construction, even if it is renamed or its name is given to another one; was_replaced() tells.
//
// AdapterRoot: immutable, thread-safe; holds one descriptor.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace pagedlora {

class AdapterRoot {
 public:
  // Who follows the path. kKernelFirst: openat2(RESOLVE_BENEATH), and where the kernel has none or
  // refuses, kOwn: one component after the other. Both open the same files.
  enum class Resolver : unsigned char { kKernelFirst, kOwn };

  // Throws AdapterNotFoundError or AdapterReadError if there is no such directory.
  explicit AdapterRoot(const std::string& directory, Resolver resolver = Resolver::kKernelFirst);
  ~AdapterRoot();
  AdapterRoot(const AdapterRoot&) = delete;
  AdapterRoot& operator=(const AdapterRoot&) = delete;

  // Absolute, as it was given.
  const std::string& path() const { return path_; }

  // Opens what `path` names, with flags as of open(2); the caller closes the descriptor. May block.
  //
  // `path` is relative to the directory, or absolute and begins with the directory's path, as
  // given or without links. Throws AdapterPathError for one that leaves the directory or contains
  // a zero byte, AdapterNotFoundError, AdapterReadError.
  int open(const std::string& path, int flags) const;

  // Whether its path names another directory by now. False if it names none.
  bool was_replaced() const noexcept;

  // Throws what opening `path`, a file or a directory, would.
  void check(const std::string& path) const;

 private:
  using Components = std::vector<std::string>;
  class Walk;

  // What of a path is below the directory. False: it is absolute and elsewhere.
  bool find_below(std::string_view path, Components& below) const;

  std::string path_;
  Components given_;  // of path_
  Components real_;   // of the same without links
  Resolver resolver_;
  int descriptor_;
};

// Opens a regular file for reading, beneath `root` unless that is null; the caller closes the
// descriptor. Never waits for the other end of a FIFO. Throws as AdapterRoot::open, and
// AdapterFormatError for a directory, FIFO, socket or device.
int open_adapter_file(const std::string& path, const AdapterRoot* root);

}  // namespace pagedlora
