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

#include "job_pool.h"
#include "pagedlora/adapter_plan.h"
#include "pagedlora/device.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/scatter_plan.h"
#include "task_pages.h"

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

  // Returns with the lock when all of them have ended. Throws JobStopped.
  std::unique_lock<std::mutex> wait_for(const PageUses& uses);

 private:
  std::shared_ptr<JobBoard> board_;
  TaskId task_;
};

// Source -> host tier, and on request the device tier in the same pass.
//
// A chunk is written under a lock of the job's own, so that stop() returns only when nothing will
// be written any more: the pages are free at that moment.
class SourceLoad final : public FillJob, private ScatterTargets {
 public:
  struct What {
    std::shared_ptr<const LoraModelConfig> config;
    std::shared_ptr<const AdapterPlan> plan;  // with a source
    std::shared_ptr<const Layout> layout;
    std::optional<std::uint64_t> checksum;  // of an earlier read: another one is an error
  };

  SourceLoad(std::shared_ptr<JobBoard> board, TaskId task, What what, FillTarget host);

  // With the board's lock. From now on the device's pages are filled as well; false, and nothing is
  // changed, if too much has been written already or if the pages are still in use.
  bool add_device(const FillTarget& device);
  void drop_device() noexcept;  // nothing is written there any more

  // The load's use of the device's pages, which ends when they are dropped. Once they were added.
  std::shared_ptr<const PageUse> device_use() const { return device_use_; }

  void run(std::span<std::byte> scratch) override;
  void stop() noexcept override;

  // Of a job that finished without an error.
  std::uint64_t checksum() const { return checksum_; }
  std::uint64_t source_bytes() const { return source_bytes_; }
  std::size_t payload_bytes() const { return what_.layout->payload_bytes(); }

 private:
  // Of the device's pages; over, at the latest, with the load.
  struct DeviceUse final : PageUse {
    explicit DeviceUse(std::shared_ptr<const PageUse> load) : of_load(std::move(load)) {}
    bool is_over() const override { return is_dropped || of_load->is_over(); }
    const std::shared_ptr<const PageUse> of_load;
    std::atomic<bool> is_dropped{false};
  };

  Access open() override;
  void fill_skipped_chunks(const ScatterPlan& scatter, SourceReader& reader,
                           std::span<std::byte> scratch);

  What what_;
  FillTarget host_;
  std::uint64_t checksum_ = 0;
  std::uint64_t source_bytes_ = 0;
  std::size_t num_chunks_ = 0;

  std::mutex write_mutex_;  // guards what follows; taken after the board's lock, or alone
  std::shared_ptr<const OwnTaskPages> device_;
  std::shared_ptr<DeviceUse> device_use_;
  std::size_t chunks_written_ = 0;
  std::size_t chunks_skipped_ = 0;  // of the device's pages
  bool only_device_ = false;
  bool is_sealed_ = false;  // the end has been reached: too late to add a target
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
