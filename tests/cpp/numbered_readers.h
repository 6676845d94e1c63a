// A source whose readers pass a gate each before they read, so that a test says which of them hangs.
//
// They are numbered in the order in which they open it: of a load that several threads read, 0 is the
// load's own, and those of helpers come later.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "pagedlora/fake/gate.h"
#include "pagedlora/tensor_source.h"

namespace pagedlora::testing_support {

class NumberedReaders final : public TensorSource,
                              public std::enable_shared_from_this<NumberedReaders> {
 public:
  explicit NumberedReaders(std::shared_ptr<const TensorSource> source)
      : source_(std::move(source)) {}

  mutable std::array<fake::Gate, 32> gates;  // those beyond the last share it

  std::size_t num_opened() const { return num_opened_; }
  std::size_t num_that_read() const { return num_that_read_; }  // anything at all
  void open_gates() const {
    for (fake::Gate& gate : gates) {
      gate.open();
    }
  }

  std::unique_ptr<SourceReader> open() const override {
    std::unique_ptr<SourceReader> reader = source_->open();
    return std::make_unique<Reader>(shared_from_this(), std::move(reader),
                                    gates[std::min(num_opened_++, gates.size() - 1)]);
  }
  std::uint64_t size_bytes() const override { return source_->size_bytes(); }
  const std::string& description() const override { return source_->description(); }

 private:
  class Reader final : public SourceReader {
   public:
    Reader(std::shared_ptr<const NumberedReaders> readers, std::unique_ptr<SourceReader> reader,
           fake::Gate& gate)
        : readers_(std::move(readers)), reader_(std::move(reader)), gate_(gate) {}

    void read(std::uint64_t offset, std::span<std::byte> into) override {
      readers_->num_that_read_ += has_read_ ? 0U : 1U;
      has_read_ = true;
      gate_.pass();
      std::this_thread::yield();  // others come to read as well, also with one core
      reader_->read(offset, into);
    }
    void finish() override { reader_->finish(); }

   private:
    std::shared_ptr<const NumberedReaders> readers_;  // has the gate
    std::unique_ptr<SourceReader> reader_;
    fake::Gate& gate_;
    bool has_read_ = false;
  };

  std::shared_ptr<const TensorSource> source_;
  mutable std::atomic<std::size_t> num_opened_{0};
  mutable std::atomic<std::size_t> num_that_read_{0};
};

}  // namespace pagedlora::testing_support
