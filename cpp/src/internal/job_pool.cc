#include "job_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "pagedlora/errors.h"

namespace pagedlora::internal {
namespace {

constexpr std::chrono::milliseconds kJoinPatience{500};

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
  {
    const std::scoped_lock lock(state_->board->mutex);
    stop(std::make_exception_ptr(InvalidArgumentError("the PEFT cache manager is closed")));
  }
  join();
}

void JobPool::finish(State& state, Job& job, std::exception_ptr error) {
  job.finished_ = true;
  job.error_ = std::move(error);
  state.board->finished.push_back(job.shared_from_this());
  state.board->changed.notify_all();
}

// Its job was finished by force and its thread is still in it.
bool JobPool::is_stuck(const Worker& worker) {
  return worker.job != nullptr && worker.job->finished_;
}

void JobPool::submit(std::shared_ptr<Job> job) {
  State& state = *state_;
  state.queue.push_back(std::move(job));
  const auto busy = std::ranges::count_if(
      state.workers, [](const auto& worker) { return worker->job != nullptr; });
  const std::size_t idle = state.workers.size() - static_cast<std::size_t>(busy);
  if (idle < state.queue.size() && state.workers.size() < state.options.num_workers) {
    start_worker();
  }
  fail_queue_if_all_are_stuck();
  state.work.notify_one();
}

void JobPool::start_worker() {
  auto worker = std::make_shared<Worker>();
  state_->workers.push_back(worker);
  try {
    std::thread([state = state_, worker] { work(state, worker); }).detach();
  } catch (const std::system_error&) {
    state_->workers.pop_back();  // the others, if any, will take the job
    if (state_->workers.empty()) {
      for (const std::shared_ptr<Job>& job : std::exchange(state_->queue, {})) {
        job->over_ = true;
        finish(*state_, *job, std::current_exception());
      }
    }
  }
}

void JobPool::work(const std::shared_ptr<State>& state, const std::shared_ptr<Worker>& worker) {
  std::vector<std::byte> scratch(state->options.scratch_bytes);
  std::unique_lock lock(state->board->mutex);
  while (!worker->is_abandoned) {
    state->work.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->stopping) {
      break;
    }
    std::shared_ptr<Job> job = std::move(state->queue.front());
    state->queue.pop_front();
    worker->job = job;
    job->started_ = state->clock->now();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    std::exception_ptr error;
    try {
      job->run(scratch);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    worker->job.reset();
    job->over_ = true;
    job->seconds_ = to_seconds(std::chrono::steady_clock::now() - start);
    if (!job->finished_) {
      finish(*state, *job, std::move(error));
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

void JobPool::expire() {
  State& state = *state_;
  const Clock::Time now = state.clock->now();
  for (const std::shared_ptr<Worker>& worker : state.workers) {
    Job* job = worker->job.get();
    if (job == nullptr || job->finished_ || now - job->started_ < state.options.limit) {
      continue;
    }
    job->stop();
    finish(state, *job,
           std::make_exception_ptr(AdapterLoadTimeout(to_seconds(state.options.limit))));
    if (state.num_abandoned < state.options.max_abandoned) {
      worker->is_abandoned = true;
      ++state.num_abandoned;
    }
  }
  std::erase_if(state.workers, [](const auto& worker) { return worker->is_abandoned; });
  const std::size_t missing = state.options.num_workers - state.workers.size();
  for (std::size_t i = std::min(missing, state.queue.size()); i > 0; --i) {
    start_worker();
  }
  fail_queue_if_all_are_stuck();
}

void JobPool::fail_queue_if_all_are_stuck() {
  State& state = *state_;
  const bool has_room = state.workers.size() < state.options.num_workers;
  if (has_room ||
      !std::ranges::all_of(state.workers, [](const auto& worker) { return is_stuck(*worker); })) {
    return;
  }
  for (const std::shared_ptr<Job>& job : std::exchange(state.queue, {})) {
    job->over_ = true;
    finish(state, *job,
           std::make_exception_ptr(AdapterLoadTimeout(to_seconds(state.options.limit),
                                                      state.num_abandoned + state.workers.size())));
  }
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
  for (const std::shared_ptr<Job>& job : std::exchange(state.queue, {})) {
    job->over_ = true;
    finish(state, *job, error);
  }
  for (const std::shared_ptr<Worker>& worker : state.workers) {
    if (worker->job != nullptr && !worker->job->finished_) {
      worker->job->stop();
      finish(state, *worker->job, error);
    }
  }
  state.work.notify_all();
}

void JobPool::join() {
  std::unique_lock lock(state_->board->mutex);
  state_->board->changed.wait_for(lock, kJoinPatience, [&] { return state_->workers.empty(); });
}

}  // namespace pagedlora::internal
