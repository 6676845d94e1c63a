#include "load_jobs.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "page_runs.h"
#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

// How often the uses of pages that end without telling anybody are looked at.
constexpr std::chrono::milliseconds kLookAgain{1};

}  // namespace

std::unique_lock<std::mutex> FillJob::wait_for(const PageUses& uses) {
  std::unique_lock lock(board().mutex);
  for (;;) {
    if (is_stopped()) {
      throw JobStopped();
    }
    if (std::ranges::all_of(uses, [](const auto& use) { return use->is_over(); })) {
      return lock;
    }
    board().changed.wait_for(lock, kLookAgain);
  }
}

SourceLoad::SourceLoad(std::shared_ptr<JobBoard> board, TaskId task, What what, FillTarget host)
    : FillJob(std::move(board), task), what_(std::move(what)), host_(std::move(host)) {}

bool SourceLoad::add_device(const FillTarget& device) {
  const bool in_use =
      !std::ranges::all_of(device.waits, [](const auto& u) { return u->is_over(); });
  const std::scoped_lock lock(write_mutex_);
  // What was written before is read once more; beyond a quarter a copy from the host is cheaper.
  const bool too_late = is_sealed_ || (num_chunks_ != 0 && chunks_written_ * 4 > num_chunks_);
  if (in_use || too_late || is_stopped() || device_ != nullptr) {
    return false;
  }
  device_use_ = std::make_shared<DeviceUse>(use());
  device_ = device.pages;
  chunks_skipped_ = chunks_written_;
  return true;
}

void SourceLoad::drop_device() noexcept {
  const std::scoped_lock lock(write_mutex_);
  device_.reset();
  if (device_use_ != nullptr) {
    device_use_->is_dropped = true;
  }
}

void SourceLoad::stop() noexcept {
  const std::scoped_lock lock(write_mutex_);
  Job::stop();
}

ScatterTargets::Access SourceLoad::open() {
  std::unique_lock lock(write_mutex_);
  if (is_stopped()) {
    throw JobStopped();
  }
  const TaskPages* device = device_ == nullptr ? nullptr : &device_->view();
  if (only_device_) {
    if (device == nullptr) {
      throw JobStopped();
    }
    return {std::move(lock), device, nullptr};
  }
  ++chunks_written_;
  return {std::move(lock), &host_.pages->view(), device};
}

void SourceLoad::run(std::span<std::byte> scratch) {
  const std::shared_ptr<const AdapterPlan> plan = std::move(what_.plan);  // dropped on this thread
  if (is_stopped()) {
    throw JobStopped();
  }
  const std::unique_ptr<SourceReader> reader = plan->source()->open();
  const bool is_first_read = !what_.checksum;
  const ScatterPlan scatter(*what_.config, *plan, *what_.layout,
                            plan->checks_values() && is_first_read);
  wait_for(host_.waits).unlock();
  {
    const std::scoped_lock lock(write_mutex_);
    num_chunks_ = scatter.source_bytes(scratch.size()) / scratch.size() + 1;
  }
  const ScatterPlan::Outcome outcome =
      scatter.execute(*reader, what_.config->dtype(), scratch, *this);
  checksum_ = outcome.checksum;
  source_bytes_ = outcome.source_bytes;
  fill_skipped_chunks(scatter, *reader, scratch);
  reader->finish();
  if (what_.checksum && *what_.checksum != checksum_) {
    throw AdapterSourceChangedError(plan->source()->description(),
                                    "its content is not what was read before");
  }
}

// The device's pages of the chunks that had been written before they were asked for.
void SourceLoad::fill_skipped_chunks(const ScatterPlan& scatter, SourceReader& reader,
                                     std::span<std::byte> scratch) {
  std::size_t skipped = 0;
  {
    const std::scoped_lock lock(write_mutex_);
    is_sealed_ = true;
    only_device_ = true;
    skipped = device_ == nullptr ? 0 : chunks_skipped_;
  }
  if (skipped != 0) {
    try {
      scatter.execute(reader, what_.config->dtype(), scratch, *this, skipped);
    } catch (const JobStopped&) {
      const std::scoped_lock lock(write_mutex_);
      if (device_ != nullptr) {
        throw;
      }  // only the device's pages were given up: those of the host are complete
    }
  }
}

TierCopy::TierCopy(std::shared_ptr<JobBoard> board, TaskId task, std::shared_ptr<Device> device,
                   Direction direction, std::shared_ptr<const OwnTaskPages> from, FillTarget to)
    : FillJob(std::move(board), task),
      device_(std::move(device)),
      direction_(direction),
      from_(std::move(from)),
      to_(std::move(to)) {}

void TierCopy::run(std::span<std::byte> /*scratch*/) {
  const PageUses queued = take_queued_waits();
  {
    const std::unique_lock lock = wait_for(to_.waits);
    own_use().touches_pages = true;  // stopped before, it will not copy
  }
  const std::vector<CopyRun> runs = page_runs(from_->view(), to_.pages->view());
  if (!queued.empty()) {
    device_->copy_from_host_behind(queued, runs);
  } else if (direction_ == Direction::to_device) {
    device_->copy_from_host(runs);
  } else {
    device_->copy_to_host(runs);
  }
}

// Those that the device waits for itself, so that the copy begins the moment they are over.
PageUses TierCopy::take_queued_waits() {
  PageUses queued;
  if (direction_ == Direction::to_device) {
    const auto is_polled = [this](const auto& use) { return !device_->can_queue_behind(*use); };
    const auto first = std::stable_partition(to_.waits.begin(), to_.waits.end(), is_polled);
    queued.assign(first, to_.waits.end());
    to_.waits.erase(first, to_.waits.end());
  }
  return queued;
}

}  // namespace pagedlora::internal
