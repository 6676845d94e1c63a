// Where an adapter's bytes come from, below both tiers: a file, or memory that a request carried.
//
// A TensorSource is kept for as long as the task is known, and costs no file descriptor while
// idle. A SourceReader is one pass over it, or a part of one that several share: it opens the file, checks that it is still the one
// that was registered, reads with pread (never mmap: a file truncated under a mapping kills
// the process), and checks again at the end.
//
// TensorSource: immutable, thread-safe. SourceReader: thread-compatible, one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pagedlora/adapter_root.h"

namespace pagedlora {

class SourceReader {
 public:
  virtual ~SourceReader() = default;

  // Fills `into` from byte `offset` of the source. May block. Throws AdapterSourceChangedError
  // if the source is shorter than it was, AdapterReadError if the system will not read it.
  virtual void read(std::uint64_t offset, std::span<std::byte> into) = 0;

  // Called after the last read, and now and then before: throws AdapterSourceChangedError if the
  // source changed since it was opened.
  virtual void finish() = 0;
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // Throws AdapterNotFoundError, AdapterReadError or AdapterSourceChangedError.
  virtual std::unique_ptr<SourceReader> open() const = 0;
  virtual std::uint64_t size_bytes() const = 0;
  virtual const std::string& description() const = 0;  // the path, or "request weights"
};

// Several sources of the same bytes, each tried in turn: an adapter that is known under two names can
// be read as long as one of its files is left. Thread-safe.
class SourceGroup final : public TensorSource {
 public:
  explicit SourceGroup(std::shared_ptr<const TensorSource> first);

  // Throws InvalidArgumentError for another size.
  void add(std::shared_ptr<const TensorSource> source);

  // Of the first that can be opened; throws what the first one throws if none can.
  std::unique_ptr<SourceReader> open() const override;
  std::uint64_t size_bytes() const override { return size_bytes_; }
  const std::string& description() const override { return description_; }

 private:
  std::uint64_t size_bytes_;
  std::string description_;  // of the first
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const TensorSource>> sources_;
};

// What tells one state of a file from another without reading it.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t mtime_ns = 0;
  std::int64_t ctime_ns = 0;

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// A regular file as it is now. With a root it is opened beneath that, now and whenever it is read
// again. Throws AdapterNotFoundError, AdapterReadError, AdapterPathError (also when it is read
// again), or AdapterFormatError for a directory, FIFO, socket or device.
std::shared_ptr<const TensorSource> open_file_source(
    const std::string& path, std::shared_ptr<const AdapterRoot> root = nullptr);

// Bytes kept alive by `owner`.
std::shared_ptr<const TensorSource> make_memory_source(std::span<const std::byte> bytes,
                                                       std::shared_ptr<const void> owner,
                                                       std::string description);

}  // namespace pagedlora
