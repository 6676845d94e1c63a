#include "job_pool.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

constexpr std::chrono::milliseconds kJoinPatience{500};

// What a scratch buffer consists of: loads of whole cache lines are faster than those across two.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

double to_seconds(Clock::Time time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

JobPool::JobPool(std::shared_ptr<JobBoard> board, std::shared_ptr<const Clock> clock,
                 Options options)
    : state_(std::make_shared<State>()) {
  state_->board = std::move(board);
  state_->clock = std::move(clock);
  state_->options = options;
}

JobPool::~JobPool() {
  if (!process_.is_here()) {
    leak(std::move(state_));  // the threads are not here that would leave it
    return;
  }
  {
    const std::scoped_lock lock(state_->board->mutex);
    stop(std::make_exception_ptr(InvalidArgumentError("the PEFT cache manager is closed")));
  }
  join();
}

// The first job of `from` moves to the board.
void JobPool::finish(State& state, JobList& from, std::exception_ptr error) {
  Job& job = *from.front();
  job.finished_ = true;
  job.error_ = std::move(error);
  state.board->finished.splice(state.board->finished.end(), from, from.begin());
  state.board->changed.notify_all();
}

// Its job was finished by force and its thread is still in it.
bool JobPool::is_stuck(const Worker& worker) {
  return worker.job != nullptr && worker.job->finished_;
}

void JobPool::submit(std::shared_ptr<Job> job) {
  State& state = *state_;
  state.workers.reserve(state.options.num_workers);
  state.queue.push_back(std::move(job));
  if (state.stopping) {
    fail_queue(std::make_exception_ptr(InvalidArgumentError("the workers have been stopped")));
    return;
  }
  start_missing_workers();
  fail_queue_if_all_are_stuck();
  state.work.notify_one();
}

bool JobPool::try_submit(const std::shared_ptr<Job>& job) {
  State& state = *state_;
  if (state.stopping) {
    return false;
  }
  state.workers.reserve(state.options.num_workers);
  JobList node{job};
  const bool has_thread =
      num_idle_threads() > state.queue.size() ||
      (state.workers.size() < state.options.num_workers && start_worker() == nullptr);
  if (!has_thread) {
    return false;
  }
  state.queue.splice(state.queue.end(), node);
  state.work.notify_one();
  return true;
}

// Stuck workers make place for others, as many as may be out at once: also those that had to keep
// their place until others came back.
void JobPool::start_missing_workers() {
  State& state = *state_;
  std::erase_if(state.workers, [&](const std::shared_ptr<Worker>& worker) {
    if (!is_stuck(*worker) || state.num_abandoned == state.options.max_abandoned) {
      return false;
    }
    worker->is_abandoned = true;
    ++state.num_abandoned;
    return true;
  });
  const std::size_t room = state.options.num_workers - state.workers.size();
  const std::size_t jobs = state.queue.size() - std::min(num_idle_threads(), state.queue.size());
  for (std::size_t i = std::min(room, jobs); i > 0; --i) {
    const std::exception_ptr error = start_worker();
    if (error != nullptr && are_all_stuck()) {
      fail_queue(error);
    }  // else the others take the jobs
  }
}

std::size_t JobPool::num_idle_threads() const {
  return static_cast<std::size_t>(std::ranges::count_if(
      state_->workers, [](const auto& worker) { return worker->job == nullptr; }));
}

// Its error, for want of threads or memory, or none.
std::exception_ptr JobPool::start_worker() noexcept {
  try {
    auto worker = std::make_shared<Worker>();
    std::thread([state = state_, worker] { work(state, worker); }).detach();
    state_->workers.push_back(std::move(worker));  // there is room
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void JobPool::fail_queue(const std::exception_ptr& error) {
  while (!state_->queue.empty()) {
    state_->queue.front()->use_->over = true;
    finish(*state_, state_->queue, error);
  }
}

void JobPool::work(const std::shared_ptr<State>& state, const std::shared_ptr<Worker>& worker) {
  std::vector<CacheLine> scratch;
  std::unique_lock lock(state->board->mutex);
  while (!worker->is_abandoned) {
    state->work.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->stopping) {
      break;
    }
    std::shared_ptr<Job> job = state->queue.front();
    worker->node.splice(worker->node.end(), state->queue, state->queue.begin());
    worker->job = job;
    job->started_ = state->clock->now();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    std::exception_ptr error;
    try {
      scratch.resize((state->options.scratch_bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine));
      job->run(std::as_writable_bytes(std::span(scratch)).first(state->options.scratch_bytes));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    worker->job.reset();
    job->use_->over = true;
    job->seconds_ = to_seconds(std::chrono::steady_clock::now() - start);
    if (!job->finished_) {
      finish(*state, worker->node, std::move(error));
    }
    state->board->changed.notify_all();
    lock.unlock();
    job.reset();  // perhaps the last reference: whatever it frees is freed without the lock
    error = nullptr;
    lock.lock();
  }
  if (worker->is_abandoned) {
    --state->num_abandoned;
  } else {
    std::erase(state->workers, worker);
  }
  state->board->changed.notify_all();
}

std::size_t JobPool::num_idle() const {
  const auto busy = static_cast<std::size_t>(std::ranges::count_if(
      state_->workers, [](const auto& worker) { return worker->job != nullptr; }));
  const std::size_t spoken_for = busy + state_->queue.size();
  return state_->options.num_workers - std::min(spoken_for, state_->options.num_workers);
}

void JobPool::expire() {
  State& state = *state_;
  const Clock::Time now = state.clock->now();
  for (const std::shared_ptr<Worker>& worker : state.workers) {
    Job* job = worker->job.get();
    if (job == nullptr || job->finished_ || now - job->started_ < state.options.limit) {
      continue;
    }
    auto error = std::make_exception_ptr(AdapterLoadTimeout(to_seconds(state.options.limit)));
    job->stop();
    finish(state, worker->node, std::move(error));
  }
  start_missing_workers();
  fail_queue_if_all_are_stuck();
}

// Nobody would take a job: nor if there are none.
bool JobPool::are_all_stuck() const {
  return std::ranges::all_of(state_->workers, [](const auto& worker) { return is_stuck(*worker); });
}

void JobPool::fail_queue_if_all_are_stuck() {
  State& state = *state_;
  const bool has_room = state.workers.size() < state.options.num_workers;
  if (has_room || state.queue.empty() || !are_all_stuck()) {
    return;
  }
  fail_queue(std::make_exception_ptr(AdapterLoadTimeout(
      to_seconds(state.options.limit), state.num_abandoned + state.workers.size())));
}

std::optional<Clock::Time> JobPool::next_expiry() const {
  std::optional<Clock::Time> first;
  for (const std::shared_ptr<Worker>& worker : state_->workers) {
    if (worker->job != nullptr && !worker->job->finished_) {
      const Clock::Time expiry = worker->job->started_ + state_->options.limit;
      first = std::min(first.value_or(expiry), expiry);
    }
  }
  return first;
}

bool JobPool::is_idle() const {
  const auto is_wanted = [](const std::shared_ptr<Job>& job) {
    return job != nullptr && !job->finished_ && !job->is_stopped();
  };
  return std::ranges::none_of(state_->queue, is_wanted) &&
         std::ranges::none_of(state_->workers,
                              [&](const auto& worker) { return is_wanted(worker->job); });
}

void JobPool::stop(const std::exception_ptr& error) {
  State& state = *state_;
  state.stopping = true;
  fail_queue(error);
  for (const std::shared_ptr<Worker>& worker : state.workers) {
    if (worker->job != nullptr && !worker->job->finished_) {
      worker->job->stop();
      finish(state, worker->node, error);
    }
  }
  state.work.notify_all();
}

void JobPool::join() {
  std::unique_lock lock(state_->board->mutex);
  state_->board->changed.wait_for(lock, kJoinPatience, [&] { return state_->workers.empty(); });
}

}  // namespace pagedlora::internal
