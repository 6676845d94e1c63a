// The two ways in which a task's pages are filled: from its source, and from its copy in the other
// tier.
//
// A job outlives whatever asked for it: it shares what it touches. Before it writes the first byte
// it waits for the uses that its pages still have from their last owner, and for nothing else. What
// the device can wait for itself (Device::can_queue_behind) goes along with the copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "job_pool.h"
#include "pagedlora/adapter_plan.h"
#include "pagedlora/device.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/scatter_plan.h"
#include "shared_reading.h"
#include "task_pages.h"
#include "write_gates.h"

namespace pagedlora::internal {

// Pages to be filled, and what must end before.
struct FillTarget {
  std::shared_ptr<const OwnTaskPages> pages;
  PageUses waits;
};

// Thrown out of run() when the result is not wanted any more.
class JobStopped : public std::exception {
 public:
  const char* what() const noexcept override { return "the load was given up"; }
};

class FillJob : public Job {
 public:
  TaskId task() const { return task_; }

 protected:
  FillJob(std::shared_ptr<JobBoard> board, TaskId task) : board_(std::move(board)), task_(task) {
    own_use().touches_pages = false;
  }

  JobBoard& board() { return *board_; }
  const std::shared_ptr<JobBoard>& shared_board() { return board_; }

  // Returns with the lock when all of them have ended. Throws JobStopped.
  std::unique_lock<std::mutex> wait_for(const PageUses& uses);

 private:
  std::shared_ptr<JobBoard> board_;
  TaskId task_;
};

// Where a load finds threads that read a part of it: not more than workers are idle at that moment.
// Helpers are threads beside the workers, so a source that hangs keeps no worker from another load
// but the one that took it.
struct LoadHelpers {
  std::weak_ptr<JobPool> workers;  // one of which runs the load
  std::weak_ptr<JobPool> helpers;
};

// As many as can run at a time beside the worker that has the load.
std::size_t num_load_helpers(std::size_t num_workers);

// Source -> host tier, and on request the device tier in the same pass.
//
// A chunk is written under a gate of its reader's, so that stop() returns only when nothing will be
// written any more: the pages are free at that moment. run() returns when every helper's piece has
// ended, or the load is stopped. A helper that comes late may still open the source then, and reads
// nothing that anybody wants.
class SourceLoad final : public FillJob {
 public:
  struct What {
    std::shared_ptr<const LoraModelConfig> config;
    std::shared_ptr<const AdapterPlan> plan;  // with a source
    std::shared_ptr<const Layout> layout;
    std::optional<std::uint64_t> checksum;  // of an earlier read: another one is an error
  };

  SourceLoad(std::shared_ptr<JobBoard> board, TaskId task, What what, FillTarget host,
             LoadHelpers helpers = {});

  // With the board's lock. From now on the device's pages are filled as well; false, and nothing is
  // changed, if too much has been written already or if the pages are still in use.
  bool add_device(const FillTarget& device);
  void drop_device() noexcept;  // nothing is written there any more

  // The load's use of the device's pages, which ends when they are dropped. Once they were added.
  std::shared_ptr<const PageUse> device_use() const { return device_use_; }

  void run(std::span<std::byte> scratch) override;
  void stop() noexcept override;

  // Reads what nobody has taken yet, through a gate that nobody else uses, not the first.
  void help(std::span<std::byte> scratch, std::size_t gate);

  // Of a job that finished without an error.
  std::uint64_t checksum() const { return outcome_.checksum; }
  std::uint64_t source_bytes() const { return outcome_.source_bytes; }
  std::size_t payload_bytes() const { return what_.layout->payload_bytes(); }

 private:
  // Of the device's pages; over, at the latest, with the load.
  struct DeviceUse final : PageUse {
    explicit DeviceUse(std::shared_ptr<const PageUse> load) : of_load(std::move(load)) {}
    bool is_over() const override { return is_dropped || of_load->is_over(); }
    const std::shared_ptr<const PageUse> of_load;
    std::atomic<bool> is_dropped{false};
  };
  class Targets;
  struct HelpEnds;

  std::shared_ptr<SharedReading> begin(std::shared_ptr<const AdapterPlan> plan,
                                       std::size_t chunk_bytes);
  void end_help() noexcept;
  void call_helpers(std::size_t num_pieces) noexcept;
  void read_pieces(SharedReading& reading, SourceReader& reader, std::span<std::byte> scratch,
                   std::size_t gate);
  void fill_skipped_chunks(const SharedReading& reading, SourceReader& reader,
                           std::span<std::byte> scratch);

  What what_;
  FillTarget host_;
  LoadHelpers helpers_;
  ScatterPlan::Outcome outcome_;
  std::atomic<std::size_t> chunks_written_{0};

  WriteGates gates_;  // guard what follows; taken after the board's lock, or alone
  std::shared_ptr<SharedReading> reading_;  // while there is something to read
  std::shared_ptr<const OwnTaskPages> device_;
  std::shared_ptr<DeviceUse> device_use_;
  std::vector<std::uint8_t> on_device_;  // by chunk; an element belongs to who reads the chunk
  // Too late to add a target: what is read again is for the device's pages alone.
  bool is_host_complete_ = false;
};

// Reads a part of a load on another thread.
class LoadHelper final : public FillJob {
 public:
  LoadHelper(std::shared_ptr<JobBoard> board, const std::shared_ptr<SourceLoad>& load,
             std::size_t gate)
      : FillJob(std::move(board), load->task()), load_(load), gate_(gate) {}

  void run(std::span<std::byte> scratch) override;

 private:
  std::weak_ptr<SourceLoad> load_;
  std::size_t gate_;
};

// One tier -> the other, by the device.
class TierCopy final : public FillJob {
 public:
  enum class Direction { to_device, to_host };

  TierCopy(std::shared_ptr<JobBoard> board, TaskId task, std::shared_ptr<Device> device,
           Direction direction, std::shared_ptr<const OwnTaskPages> from, FillTarget to);

  void run(std::span<std::byte> scratch) override;

 private:
  PageUses take_queued_waits();

  std::shared_ptr<Device> device_;
  Direction direction_;
  std::shared_ptr<const OwnTaskPages> from_;
  FillTarget to_;
};

}  // namespace pagedlora::internal
