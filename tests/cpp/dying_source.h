// A source with something to do when it is destroyed: as sources of other languages have.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "pagedlora/tensor_source.h"

namespace pagedlora::testing_support {

class DyingSource final : public TensorSource {
 public:
  DyingSource(std::shared_ptr<const TensorSource> source, std::function<void()> last_act)
      : source_(std::move(source)), last_act_(std::move(last_act)) {}
  ~DyingSource() override { last_act_(); }
  DyingSource(const DyingSource&) = delete;
  DyingSource& operator=(const DyingSource&) = delete;

  std::unique_ptr<SourceReader> open() const override { return source_->open(); }
  std::uint64_t size_bytes() const override { return source_->size_bytes(); }
  const std::string& description() const override { return source_->description(); }

 private:
  std::shared_ptr<const TensorSource> source_;
  std::function<void()> last_act_;
};

}  // namespace pagedlora::testing_support
