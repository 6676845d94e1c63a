#include "pagedlora/tensor_source.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "internal/pread_all.h"
#include "internal/regular_file.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using internal::OpenFile;

// What to report about a file that is no longer the one registered.
std::string describe_difference(const FileIdentity& registered, const FileIdentity& now) {
  if (registered.device != now.device || registered.inode != now.inode) {
    return "the path now names another file (inode " + std::to_string(registered.inode) + ", now " +
           std::to_string(now.inode) + ")";
  }
  if (registered.size_bytes != now.size_bytes) {
    return "its size was " + std::to_string(registered.size_bytes) + " bytes and is " +
           std::to_string(now.size_bytes);
  }
  if (registered.mtime_ns != now.mtime_ns) {
    return "it was written to (modification time " + std::to_string(registered.mtime_ns) +
           " ns, now " + std::to_string(now.mtime_ns) + " ns)";
  }
  return "its status changed (change time " + std::to_string(registered.ctime_ns) + " ns, now " +
         std::to_string(now.ctime_ns) + " ns)";
}

// Reads within `size_bytes`, the size at registration; asking for more is the caller's mistake.
void check_range(const std::string& description, std::uint64_t offset, std::size_t num_bytes,
                 std::uint64_t size_bytes) {
  if (offset > size_bytes || num_bytes > size_bytes - offset) {
    throw InvalidArgumentError(description + ": cannot read " + std::to_string(num_bytes) +
                               " bytes at " + std::to_string(offset) + " of " +
                               std::to_string(size_bytes));
  }
}

class FileReader final : public SourceReader {
 public:
  FileReader(std::string path, OpenFile file) : path_(std::move(path)), file_(std::move(file)) {}

  void read(std::uint64_t offset, std::span<std::byte> into) override {
    check_range(path_, offset, into.size(), file_.identity.size_bytes);
    const auto read_some = [this](void* to, std::size_t num_bytes, std::uint64_t from) {
      return ::pread(file_.fd.get(), to, num_bytes, static_cast<off_t>(from));
    };
    const internal::ReadOutcome outcome = internal::pread_all(read_some, offset, into);
    if (outcome.error_number != 0) {
      throw AdapterReadError(path_, outcome.error_number);
    }
    if (outcome.num_bytes < into.size()) {
      throw AdapterSourceChangedError(
          path_, "its size was " + std::to_string(file_.identity.size_bytes) +
                     " bytes, but it ends at " + std::to_string(offset + outcome.num_bytes));
    }
  }

  void finish() override {
    const FileIdentity now = internal::identity_of_fd(file_.fd.get(), path_);
    if (now != file_.identity) {
      throw AdapterSourceChangedError(path_, describe_difference(file_.identity, now));
    }
  }

 private:
  std::string path_;
  OpenFile file_;
};

class FileSource final : public TensorSource {
 public:
  FileSource(std::string path, std::shared_ptr<const AdapterRoot> root,
             const FileIdentity& identity)
      : path_(std::move(path)), root_(std::move(root)), identity_(identity) {}

  std::unique_ptr<SourceReader> open() const override {
    OpenFile file = open_again();
    if (file.identity != identity_) {
      throw AdapterSourceChangedError(path_, describe_difference(identity_, file.identity));
    }
    return std::make_unique<FileReader>(path_, std::move(file));
  }

  std::uint64_t size_bytes() const override { return identity_.size_bytes; }
  const std::string& description() const override { return path_; }

 private:
  OpenFile open_again() const {
    try {
      return internal::open_regular_file(path_, root_.get(), [this](const std::string& kind) {
        throw AdapterSourceChangedError(path_, "it is now " + kind);
      });
    } catch (const AdapterNotFoundError&) {
      if (root_ == nullptr || !root_->was_replaced()) {
        throw;
      }
      // There may well be such a file, in the directory that has the name now.
      throw AdapterSourceChangedError(path_, "the directory " + root_->path() + " was replaced");
    }
  }

  std::string path_;
  std::shared_ptr<const AdapterRoot> root_;
  FileIdentity identity_;
};

// Keeps the bytes alive, and with them every reader.
struct SharedBytes {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
  std::string description;
};

class MemoryReader final : public SourceReader {
 public:
  explicit MemoryReader(SharedBytes memory) : memory_(std::move(memory)) {}

  void read(std::uint64_t offset, std::span<std::byte> into) override {
    check_range(memory_.description, offset, into.size(), memory_.bytes.size());
    if (!into.empty()) {
      std::memcpy(into.data(), memory_.bytes.data() + offset, into.size());
    }
  }

  void finish() override {}

 private:
  SharedBytes memory_;
};

class MemorySource final : public TensorSource {
 public:
  explicit MemorySource(SharedBytes memory) : memory_(std::move(memory)) {}

  std::unique_ptr<SourceReader> open() const override {
    return std::make_unique<MemoryReader>(memory_);
  }

  std::uint64_t size_bytes() const override { return memory_.bytes.size(); }
  const std::string& description() const override { return memory_.description; }

 private:
  SharedBytes memory_;
};

}  // namespace

SourceGroup::SourceGroup(std::shared_ptr<const TensorSource> first)
    : size_bytes_(first->size_bytes()), description_(first->description()) {
  sources_.push_back(std::move(first));
}

void SourceGroup::add(std::shared_ptr<const TensorSource> source) {
  if (source->size_bytes() != size_bytes_) {
    throw InvalidArgumentError(source->description() + " has " +
                               std::to_string(source->size_bytes()) + " bytes, not the " +
                               std::to_string(size_bytes_) + " of " + description_);
  }
  const std::scoped_lock lock(mutex_);
  sources_.push_back(std::move(source));
}

std::unique_ptr<SourceReader> SourceGroup::open() const {
  std::vector<std::shared_ptr<const TensorSource>> sources;
  {
    const std::scoped_lock lock(mutex_);
    sources = sources_;
  }
  std::exception_ptr first_error;
  for (const std::shared_ptr<const TensorSource>& source : sources) {
    try {
      return source->open();
    } catch (const Error&) {
      if (first_error == nullptr) {
        first_error = std::current_exception();
      }
    }
  }
  std::rethrow_exception(first_error);
}

std::shared_ptr<const TensorSource> open_file_source(const std::string& path,
                                                     std::shared_ptr<const AdapterRoot> root) {
  const OpenFile file =
      internal::open_regular_file(path, root.get(), internal::refuse_as_format_error(path));
  return std::make_shared<FileSource>(path, std::move(root), file.identity);
}

std::shared_ptr<const TensorSource> make_memory_source(std::span<const std::byte> bytes,
                                                       std::shared_ptr<const void> owner,
                                                       std::string description) {
  return std::make_shared<MemorySource>(
      SharedBytes{bytes, std::move(owner), std::move(description)});
}

}  // namespace pagedlora
