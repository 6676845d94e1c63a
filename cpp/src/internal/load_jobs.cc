#include "load_jobs.h"

#include <algorithm>
#include <chrono>
#include <thread>
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

std::size_t num_load_helpers(std::size_t num_workers) {
  const std::size_t num_cores = std::max(std::thread::hardware_concurrency(), 1U);
  return std::min({num_workers, num_cores, WriteGates::kNumGates}) - 1;
}

// What one reader of the load writes to.
class SourceLoad::Targets final : public ScatterTargets {
 public:
  Targets(SourceLoad& load, std::size_t gate) : load_(load), gate_(gate) {}

  bool wants(std::size_t chunk) override {
    const WriteGates::One lock = load_.gates_.enter(gate_);
    return !load_.is_host_complete_ || load_.on_device_[chunk] == 0;
  }

  Access open(std::size_t chunk) override {
    WriteGates::One lock = load_.gates_.enter(gate_);
    if (load_.is_stopped()) {
      throw JobStopped();
    }
    const TaskPages* device = load_.device_ == nullptr ? nullptr : &load_.device_->view();
    if (load_.is_host_complete_) {
      if (device == nullptr) {
        throw JobStopped();
      }
      return {std::move(lock), device, nullptr};
    }
    ++load_.chunks_written_;
    load_.on_device_[chunk] = device == nullptr ? 0 : 1;
    return {std::move(lock), &load_.host_.pages->view(), device};
  }

 private:
  SourceLoad& load_;
  std::size_t gate_;
};

SourceLoad::SourceLoad(std::shared_ptr<JobBoard> board, TaskId task, What what, FillTarget host,
                       LoadHelpers helpers)
    : FillJob(std::move(board), task),
      what_(std::move(what)),
      host_(std::move(host)),
      helpers_(std::move(helpers)) {}

bool SourceLoad::add_device(const FillTarget& device) {
  const bool in_use =
      !std::ranges::all_of(device.waits, [](const auto& u) { return u->is_over(); });
  const WriteGates::All closed = gates_.close();
  // What was written before is read once more; beyond a quarter a copy from the host is cheaper.
  const bool too_late = is_host_complete_ || chunks_written_ * 4 > on_device_.size();
  if (in_use || too_late || is_stopped() || device_ != nullptr) {
    return false;
  }
  device_use_ = std::make_shared<DeviceUse>(use());
  device_ = device.pages;
  std::ranges::fill(on_device_, 0);
  return true;
}

void SourceLoad::drop_device() noexcept {
  const WriteGates::All closed = gates_.close();
  device_.reset();
  if (device_use_ != nullptr) {
    device_use_->is_dropped = true;
  }
}

void SourceLoad::stop() noexcept {
  const WriteGates::All closed = gates_.close();
  Job::stop();
  if (reading_ != nullptr) {
    reading_->stop_waiting();
  }
}

// However run() ends, helpers that come later find nothing to do.
struct SourceLoad::HelpEnds {
  explicit HelpEnds(SourceLoad& of_load) : load(of_load) {}
  HelpEnds(const HelpEnds&) = delete;
  HelpEnds& operator=(const HelpEnds&) = delete;
  ~HelpEnds() { load.end_help(); }

  SourceLoad& load;
};

void SourceLoad::run(std::span<std::byte> scratch) {
  // Dropped without a lock, after the reader of its source.
  const std::shared_ptr<const AdapterPlan> plan = std::move(what_.plan);
  if (is_stopped()) {
    throw JobStopped();
  }
  const std::unique_ptr<SourceReader> reader = plan->source()->open();
  wait_for(host_.waits).unlock();
  const std::shared_ptr<SharedReading> reading = begin(plan, scratch.size());
  const HelpEnds help_ends(*this);
  call_helpers(reading->pieces().size());
  read_pieces(*reading, *reader, scratch, 0);
  if (!reading->wait_for_taken()) {
    throw JobStopped();
  }
  outcome_ = reading->outcome();
  fill_skipped_chunks(*reading, *reader, scratch);
  reader->finish();
  if (what_.checksum && *what_.checksum != outcome_.checksum) {
    throw AdapterSourceChangedError(reading->plan().source()->description(),
                                    "its content is not what was read before");
  }
}

std::shared_ptr<SharedReading> SourceLoad::begin(std::shared_ptr<const AdapterPlan> plan,
                                                 std::size_t chunk_bytes) {
  const bool check_values = plan->checks_values() && !what_.checksum;  // at the first read
  auto reading = std::make_shared<SharedReading>(what_.config, std::move(plan), what_.layout,
                                                 check_values, chunk_bytes);
  std::vector<std::uint8_t> on_device(reading->num_chunks());
  const WriteGates::All closed = gates_.close();
  on_device_.swap(on_device);
  reading_ = reading;
  return reading;
}

void SourceLoad::end_help() noexcept {
  std::shared_ptr<SharedReading> reading;  // outlives the lock
  const WriteGates::All closed = gates_.close();
  reading.swap(reading_);
}

// The load gets on without them: one that cannot be had, for want of memory or threads, is not
// missed, and the next load asks for it again.
void SourceLoad::call_helpers(std::size_t num_pieces) noexcept {
  if (num_pieces < 2) {
    return;
  }
  try {
    const auto self = std::static_pointer_cast<SourceLoad>(shared_from_this());
    const std::scoped_lock lock(board().mutex);
    if (is_stopped()) {
      return;
    }
    // A manager stops its loads before it lets go of its pools: these are not the last references.
    const std::shared_ptr<JobPool> workers = helpers_.workers.lock();
    const std::shared_ptr<JobPool> helpers = helpers_.helpers.lock();
    if (workers == nullptr || helpers == nullptr) {
      return;
    }
    const std::size_t last_gate =
        std::min({num_pieces - 1, WriteGates::kNumGates - 1, workers->num_idle()});
    for (std::size_t gate = 1; gate <= last_gate; ++gate) {
      if (!helpers->try_submit(std::make_shared<LoadHelper>(shared_board(), self, gate))) {
        return;
      }
    }
  } catch (...) {
    return;
  }
}

void SourceLoad::help(std::span<std::byte> scratch, std::size_t gate) {
  std::shared_ptr<SharedReading> reading;
  {
    const WriteGates::One lock = gates_.enter(gate);
    reading = reading_;
  }
  if (reading != nullptr && scratch.size() >= reading->chunk_bytes()) {
    const std::unique_ptr<SourceReader> reader = reading->plan().source()->open();
    read_pieces(*reading, *reader, scratch, gate);
  }
}

void SourceLoad::read_pieces(SharedReading& reading, SourceReader& reader,
                             std::span<std::byte> scratch, std::size_t gate) {
  Targets targets(*this, gate);
  while (const std::optional<std::size_t> piece = reading.take()) {
    try {
      const ScatterPlan::Outcome outcome = reading.scatter().execute(
          reader, what_.config->dtype(), scratch.first(reading.chunk_bytes()), targets,
          reading.pieces()[*piece]);
      if (gate != 0) {
        reader.finish();  // before anybody relies on the piece
      }
      reading.end(*piece, outcome);
    } catch (...) {
      reading.end(*piece, std::current_exception());
    }
  }
}

// The device's pages of the chunks that had been written before they were asked for.
void SourceLoad::fill_skipped_chunks(const SharedReading& reading, SourceReader& reader,
                                     std::span<std::byte> scratch) {
  bool are_skipped = false;
  {
    const WriteGates::All closed = gates_.close();
    is_host_complete_ = true;
    are_skipped = device_ != nullptr && std::ranges::find(on_device_, 0) != on_device_.end();
  }
  if (are_skipped) {
    try {
      Targets targets(*this, 0);
      reading.scatter().execute(reader, what_.config->dtype(), scratch, targets, {});
    } catch (const JobStopped&) {
      const WriteGates::All closed = gates_.close();
      if (device_ != nullptr) {
        throw;
      }  // only the device's pages were given up: those of the host are complete
    }
  }
}

void LoadHelper::run(std::span<std::byte> scratch) {
  if (const std::shared_ptr<SourceLoad> load = load_.lock()) {
    load->help(scratch, gate_);
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
