// One pass over an adapter's source by one thread or several: which pieces of it are taken, and how
// they ended.
//
//     left --take()--> taken --end()--> ended, well or with an error
//
// Pieces are taken in the order of the source, and none after one has failed. So every piece before
// the first that failed ends as well, and neither the error that is reported nor the checksum tells
// who was faster.
//
// Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "pagedlora/adapter_plan.h"
#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/scatter_plan.h"

namespace pagedlora::internal {

class SharedReading {
 public:
  // What one thread reads before it asks for more, in full chunks: 2 MiB, which takes far longer
  // than asking.
  static constexpr std::size_t kChunksPerPiece = 8;

  SharedReading(std::shared_ptr<const LoraModelConfig> config,
                std::shared_ptr<const AdapterPlan> plan, std::shared_ptr<const Layout> layout,
                bool check_values, std::size_t chunk_bytes);

  const LoraModelConfig& config() const { return *config_; }
  const AdapterPlan& plan() const { return *plan_; }
  const ScatterPlan& scatter() const { return scatter_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }  // for which the pieces were made
  const std::vector<ScatterPlan::Piece>& pieces() const { return pieces_; }
  std::size_t num_chunks() const;

  // The number of a piece, which must be ended; none: nothing is left to do.
  std::optional<std::size_t> take();
  void end(std::size_t piece, const ScatterPlan::Outcome& outcome);
  void end(std::size_t piece, std::exception_ptr error);

  // Waits until every piece that was taken has ended: true, or until it is told to stop.
  bool wait_for_taken();
  void stop_waiting() noexcept;

  // Of all pieces, once they have ended. Throws the error of the first that failed.
  ScatterPlan::Outcome outcome() const;

 private:
  struct Ended {
    ScatterPlan::Outcome outcome;
    std::exception_ptr error;
  };

  void end(std::size_t piece, Ended ended);

  std::shared_ptr<const LoraModelConfig> config_;
  std::shared_ptr<const AdapterPlan> plan_;
  std::shared_ptr<const Layout> layout_;
  ScatterPlan scatter_;
  std::size_t chunk_bytes_;
  std::vector<ScatterPlan::Piece> pieces_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Ended> ended_;
  std::size_t num_taken_ = 0;
  std::size_t num_ended_ = 0;
  bool has_failed_ = false;
  bool stops_waiting_ = false;
};

}  // namespace pagedlora::internal
