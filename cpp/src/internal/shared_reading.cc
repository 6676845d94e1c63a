#include "shared_reading.h"

#include <span>
#include <utility>

#include "checksum.h"

namespace pagedlora::internal {

SharedReading::SharedReading(std::shared_ptr<const LoraModelConfig> config,
                             std::shared_ptr<const AdapterPlan> plan,
                             std::shared_ptr<const Layout> layout, bool check_values,
                             std::size_t chunk_bytes)
    : config_(std::move(config)),
      plan_(std::move(plan)),
      layout_(std::move(layout)),
      scatter_(*config_, *plan_, *layout_, check_values),
      chunk_bytes_(chunk_bytes),
      pieces_(scatter_.pieces(chunk_bytes, kChunksPerPiece * chunk_bytes)),
      ended_(pieces_.size()) {}

std::size_t SharedReading::num_chunks() const {
  return pieces_.empty() ? 0 : pieces_.back().first_chunk + pieces_.back().num_chunks;
}

std::optional<std::size_t> SharedReading::take() {
  const std::scoped_lock lock(mutex_);
  if (has_failed_ || num_taken_ == pieces_.size()) {
    return std::nullopt;
  }
  return num_taken_++;
}

void SharedReading::end(std::size_t piece, const ScatterPlan::Outcome& outcome) {
  end(piece, Ended{outcome, nullptr});
}

void SharedReading::end(std::size_t piece, std::exception_ptr error) {
  end(piece, Ended{{}, std::move(error)});
}

void SharedReading::end(std::size_t piece, Ended ended) {
  const std::scoped_lock lock(mutex_);
  has_failed_ |= ended.error != nullptr;
  ended_[piece] = std::move(ended);
  ++num_ended_;
  changed_.notify_all();
}

bool SharedReading::wait_for_taken() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_ended_ == num_taken_ || stops_waiting_; });
  return num_ended_ == num_taken_;
}

void SharedReading::stop_waiting() noexcept {
  const std::scoped_lock lock(mutex_);
  stops_waiting_ = true;
  changed_.notify_all();
}

ScatterPlan::Outcome SharedReading::outcome() const {
  const std::scoped_lock lock(mutex_);
  Checksum checksum;
  ScatterPlan::Outcome all;
  for (const Ended& ended : ended_) {
    if (ended.error != nullptr) {
      std::rethrow_exception(ended.error);
    }
    checksum.update(std::as_bytes(std::span(&ended.outcome.checksum, 1)));
    all.source_bytes += ended.outcome.source_bytes;
  }
  all.checksum = checksum.value();
  return all;
}

}  // namespace pagedlora::internal
