// A temporary file for what is computed once from an adapter and read again with it: its DoRA
// scales.
//
// The file has no name: it is gone when the last piece of it is, however the process ends. Pieces
// are written once, behind each other; the space of a piece that nobody needs any more goes back to
// the file system. ScratchFile: thread-safe. ScratchPiece: immutable, thread-safe.
//
// A child of fork() shares the file with its parent: it may read, and changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "pagedlora/process_mark.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora {

class ScratchFile;

// Some bytes of a ScratchFile. Keeps the file.
class ScratchPiece {
 public:
  ScratchPiece(std::shared_ptr<const ScratchFile> file, std::uint64_t offset, std::size_t bytes);
  ScratchPiece(const ScratchPiece&) = delete;
  ScratchPiece& operator=(const ScratchPiece&) = delete;
  ~ScratchPiece();

  std::size_t size_bytes() const { return bytes_; }

  // Fills `into` from byte `offset` of the piece. May block. Throws InvalidArgumentError beyond its
  // end, AdapterReadError if the system will not read it.
  void read(std::uint64_t offset, std::span<std::byte> into) const;

 private:
  std::shared_ptr<const ScratchFile> file_;
  std::uint64_t offset_;
  std::size_t bytes_;
};

class ScratchFile : public std::enable_shared_from_this<ScratchFile> {
 public:
  // In the directory. Throws AdapterReadError if the system will not make it.
  static std::shared_ptr<ScratchFile> create(const std::string& directory);

  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile();

  // Writes the bytes behind all others. May block. Throws AdapterReadError if the system will not
  // take them (a full disk); nothing is kept of them then. Throws InvalidArgumentError in a child.
  std::shared_ptr<const ScratchPiece> append(std::span<const std::byte> bytes);

  // Bytes that it takes in its file system now.
  std::uint64_t used_bytes() const;

 private:
  friend class ScratchPiece;

  ScratchFile(int fd, std::string description) : fd_(fd), description_(std::move(description)) {}

  void give_back(std::uint64_t offset, std::size_t bytes) const noexcept;

  ProcessMark process_;
  int fd_;
  std::string description_;
  std::mutex mutex_;
  std::uint64_t end_ = 0;  // guarded by mutex_
};

// A source whose bytes are those of `head` and then those of `tail`. The checks of `head` stay; the
// size of `head` must not change.
std::shared_ptr<const TensorSource> with_tail(std::shared_ptr<const TensorSource> head,
                                              std::shared_ptr<const ScratchPiece> tail);

}  // namespace pagedlora
