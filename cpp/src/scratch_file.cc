#include "pagedlora/scratch_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "internal/pread_all.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

// Pieces begin at multiples of it, as only whole blocks of a file system can be given back.
constexpr std::uint64_t kBlockBytes = 4096;

std::uint64_t whole_blocks(std::uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// A file without a name, or -1 with errno set.
int open_nameless(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) {
    return fd;
  }
  std::string name = directory + "/pagedlora-XXXXXX";  // the file system knows no O_TMPFILE
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) {
    ::unlink(name.c_str());
  }
  return named;
}

// Reads the head, then the tail.
class TailedReader final : public SourceReader {
 public:
  TailedReader(std::unique_ptr<SourceReader> head, std::uint64_t head_bytes,
               std::shared_ptr<const ScratchPiece> tail)
      : head_(std::move(head)), head_bytes_(head_bytes), tail_(std::move(tail)) {}

  void read(std::uint64_t offset, std::span<std::byte> into) override {
    const std::uint64_t left = offset < head_bytes_ ? head_bytes_ - offset : 0;
    const auto of_head = static_cast<std::size_t>(std::min<std::uint64_t>(left, into.size()));
    if (of_head != 0 || into.empty()) {
      head_->read(offset, into.first(of_head));
    }
    if (of_head < into.size()) {
      tail_->read(offset + of_head - head_bytes_, into.subspan(of_head));
    }
  }

  void finish() override { head_->finish(); }

 private:
  std::unique_ptr<SourceReader> head_;
  std::uint64_t head_bytes_;
  std::shared_ptr<const ScratchPiece> tail_;
};

class TailedSource final : public TensorSource {
 public:
  TailedSource(std::shared_ptr<const TensorSource> head, std::shared_ptr<const ScratchPiece> tail)
      : head_(std::move(head)), head_bytes_(head_->size_bytes()), tail_(std::move(tail)) {}

  std::unique_ptr<SourceReader> open() const override {
    return std::make_unique<TailedReader>(head_->open(), head_bytes_, tail_);
  }
  std::uint64_t size_bytes() const override { return head_bytes_ + tail_->size_bytes(); }
  const std::string& description() const override { return head_->description(); }

 private:
  std::shared_ptr<const TensorSource> head_;
  std::uint64_t head_bytes_;
  std::shared_ptr<const ScratchPiece> tail_;
};

}  // namespace

ScratchPiece::ScratchPiece(std::shared_ptr<const ScratchFile> file, std::uint64_t offset,
                           std::size_t bytes)
    : file_(std::move(file)), offset_(offset), bytes_(bytes) {}

ScratchPiece::~ScratchPiece() { file_->give_back(offset_, bytes_); }

void ScratchPiece::read(std::uint64_t offset, std::span<std::byte> into) const {
  if (offset > bytes_ || into.size() > bytes_ - offset) {
    throw InvalidArgumentError(file_->description_ + ": cannot read " +
                               std::to_string(into.size()) + " bytes at " + std::to_string(offset) +
                               " of a piece of " + std::to_string(bytes_));
  }
  const auto read_some = [this](void* to, std::size_t num_bytes, std::uint64_t from) {
    return ::pread(file_->fd_, to, num_bytes, static_cast<off_t>(from));
  };
  const internal::ReadOutcome outcome = internal::pread_all(read_some, offset_ + offset, into);
  if (outcome.num_bytes < into.size()) {
    throw AdapterReadError(file_->description_,
                           outcome.error_number == 0 ? EIO : outcome.error_number);
  }
}

std::shared_ptr<ScratchFile> ScratchFile::create(const std::string& directory) {
  const int fd = open_nameless(directory);
  std::string description = "the scratch file in " + directory + " (TMPDIR chooses it)";
  if (fd < 0) {
    throw AdapterReadError(description, errno);
  }
  return std::shared_ptr<ScratchFile>(new ScratchFile(fd, std::move(description)));
}

ScratchFile::~ScratchFile() { ::close(fd_); }

std::shared_ptr<const ScratchPiece> ScratchFile::append(std::span<const std::byte> bytes) {
  process_.check("this scratch file");
  const std::scoped_lock lock(mutex_);
  // Made first: if the write fails, what it wrote of the piece is given back.
  auto piece = std::make_shared<const ScratchPiece>(shared_from_this(), end_, bytes.size());
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t count =
        ::pwrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(end_ + done));
    if (count < 0 && errno != EINTR) {
      throw AdapterReadError(description_, errno);
    }
    done += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
  end_ += whole_blocks(bytes.size());
  return piece;
}

std::uint64_t ScratchFile::used_bytes() const {
  struct stat status{};
  return ::fstat(fd_, &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

// Without support for holes the space is lost until the file is.
void ScratchFile::give_back(std::uint64_t offset, std::size_t bytes) const noexcept {
  if (bytes != 0 && process_.is_here()) {
    static_cast<void>(::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(offset),
                                  static_cast<off_t>(whole_blocks(bytes))));
  }
}

std::shared_ptr<const TensorSource> with_tail(std::shared_ptr<const TensorSource> head,
                                              std::shared_ptr<const ScratchPiece> tail) {
  return std::make_shared<TailedSource>(std::move(head), std::move(tail));
}

}  // namespace pagedlora
