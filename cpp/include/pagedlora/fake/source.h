// A source for tests: bytes in memory, reads that are late, never done or failing.
//
// Counts how it is used. Thread-safe, but for `bytes`, which are written while nobody reads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/fake/gate.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora::fake {

class Source final : public TensorSource, public std::enable_shared_from_this<Source> {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  explicit Source(std::vector<std::byte> content, std::string description = "fake source")
      : bytes(std::move(content)), description_(std::move(description)) {}

  // Every read passes it before it gives a byte.
  mutable Gate gate;

  // What the next pass does; a failure happens once and is then forgotten.
  mutable std::atomic<bool> fail_open{false};        // AdapterNotFoundError
  mutable std::atomic<int> fail_read_after{kNever};  // 0: the first read; AdapterReadError
  mutable std::atomic<bool> fail_finish{false};      // AdapterSourceChangedError

  mutable std::atomic<int> opens{0};
  mutable std::atomic<int> reads{0};
  mutable std::atomic<int> finishes{0};
  mutable std::atomic<int> live_readers{0};
  mutable std::atomic<std::uint64_t> bytes_read{0};

  std::vector<std::byte> bytes;

  std::unique_ptr<SourceReader> open() const override {
    if (fail_open.exchange(false)) {
      throw AdapterNotFoundError(description_);
    }
    ++opens;
    return std::make_unique<Reader>(shared_from_this());
  }
  std::uint64_t size_bytes() const override { return bytes.size(); }
  const std::string& description() const override { return description_; }

 private:
  class Reader final : public SourceReader {
   public:
    explicit Reader(std::shared_ptr<const Source> source) : source_(std::move(source)) {
      ++source_->live_readers;
    }
    ~Reader() override { --source_->live_readers; }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    void read(std::uint64_t offset, std::span<std::byte> into) override {
      source_->gate.pass();
      if (source_->is_read_to_fail()) {
        throw AdapterReadError(source_->description_, EIO);
      }
      if (offset + into.size() > source_->bytes.size()) {
        throw std::logic_error("a read beyond the end of the source");
      }
      ++source_->reads;
      source_->bytes_read += into.size();
      std::copy_n(source_->bytes.begin() + static_cast<std::ptrdiff_t>(offset), into.size(),
                  into.begin());
    }
    void finish() override {
      ++source_->finishes;
      if (source_->fail_finish.exchange(false)) {
        throw AdapterSourceChangedError(source_->description_, "the fake source was told so");
      }
    }

   private:
    std::shared_ptr<const Source> source_;
  };

  // Counts the read.
  bool is_read_to_fail() const {
    int left = fail_read_after;
    while (left != kNever) {
      if (fail_read_after.compare_exchange_weak(left, left == 0 ? kNever : left - 1)) {
        return left == 0;
      }
    }
    return false;
  }

  std::string description_;
};

}  // namespace pagedlora::fake
