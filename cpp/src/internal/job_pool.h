// Work that may block - reading a source, a device's copy - on threads of its own, each of which
// can be given up.
//
//     queued --a worker takes it--> running --run() returned or threw--> finished
//                                      \---- its time is up -----------> finished
//
// A job whose time is up is finished, with an error, although its thread is still in run(): the
// thread is abandoned, and another one may take its place. It owns its scratch buffer and shares
// the job, and nothing else, so it may come back at any time, even after the pool is gone. At most
// `max_abandoned` threads may be out at once; beyond that a stuck thread keeps its place, and when
// no thread is left every job fails at once.
//
// JobBoard has the one lock of a manager and of its pools. What says so is called with it held.
// A job's node is made when it is given to the pool and moved from list to list, so that nothing
// after submit() needs memory for it. Jobs own what others made (plans, buffers of Python), so the
// last reference to one is never dropped with the lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "pagedlora/clock.h"
#include "pagedlora/page_use.h"
#include "pagedlora/process_mark.h"

namespace pagedlora::internal {

class Job;
using JobList = std::list<std::shared_ptr<Job>>;

struct JobBoard {
  std::mutex mutex;
  std::condition_variable changed;  // a job finished or left its thread, or more
  JobList finished;                 // not yet looked at by the manager
};

// What a job does with the pages of its entries. Outlives the job.
class JobUse final : public PageUse {
 public:
  bool is_over() const override { return over || (stopped && !touches_pages); }

  std::atomic<bool> stopped{false};
  std::atomic<bool> touches_pages{true};  // also after stop(), until run() returns
  std::atomic<bool> over{false};          // no thread is or will be in run()
};

class Job : public std::enable_shared_from_this<Job> {
 public:
  Job() = default;
  virtual ~Job() { use_->over = true; }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // On a worker, without the lock. May block and throw.
  virtual void run(std::span<std::byte> scratch) = 0;

  // With the lock: nobody wants the result any more. The job ends as soon as it can.
  virtual void stop() noexcept { use_->stopped = true; }

  // With the lock.
  bool is_finished() const { return finished_; }
  const std::exception_ptr& error() const { return error_; }  // of a finished job
  double seconds() const { return seconds_; }                 // that run() took

  std::shared_ptr<const PageUse> use() const { return use_; }
  bool is_over() const { return use_->is_over(); }

 protected:
  bool is_stopped() const { return use_->stopped; }
  JobUse& own_use() { return *use_; }

 private:
  friend class JobPool;

  const std::shared_ptr<JobUse> use_ = std::make_shared<JobUse>();
  bool finished_ = false;
  std::exception_ptr error_;
  double seconds_ = 0;
  Clock::Time started_{};
};

class JobPool {
 public:
  struct Options {
    std::size_t num_workers = 1;
    std::size_t max_abandoned = 0;
    std::size_t scratch_bytes = 0;  // per worker; begins with a cache line
    Clock::Time limit{};            // of run(), from when a worker takes the job
  };

  JobPool(std::shared_ptr<JobBoard> board, std::shared_ptr<const Clock> clock, Options options);
  ~JobPool();
  JobPool(const JobPool&) = delete;
  JobPool& operator=(const JobPool&) = delete;

  // With the lock. Jobs are taken in the order in which they are given. Throws std::bad_alloc, and
  // knows nothing of the job then.
  void submit(std::shared_ptr<Job> job);

  // The same for a job that is worth nothing later: false, and the pool knows nothing of it, if there
  // is no thread that takes it at once.
  bool try_submit(const std::shared_ptr<Job>& job);

  // With the lock: how many jobs more would be run at once.
  std::size_t num_idle() const;

  // With the lock: finishes the jobs whose time is up.
  void expire();

  // With the lock: when expire() will have to do something, if nothing else happens.
  std::optional<Clock::Time> next_expiry() const;

  // With the lock: no job is queued or running that anybody still wants.
  bool is_idle() const;

  // With the lock: finishes every job with `error` and lets the threads go.
  void stop(const std::exception_ptr& error);

  // Without the lock: waits, for a while, until the threads that are not stuck have ended.
  void join();

 private:
  struct Worker {
    std::shared_ptr<Job> job;  // that it runs
    JobList node;              // of that job, until it is finished
    bool is_abandoned = false;
  };
  struct State {
    std::shared_ptr<JobBoard> board;
    std::shared_ptr<const Clock> clock;
    Options options;
    std::condition_variable work;
    JobList queue;
    std::vector<std::shared_ptr<Worker>> workers;  // without the abandoned ones
    std::size_t num_abandoned = 0;
    bool stopping = false;
  };

  static void work(const std::shared_ptr<State>& state, const std::shared_ptr<Worker>& worker);
  static void finish(State& state, JobList& from, std::exception_ptr error);
  static bool is_stuck(const Worker& worker);
  std::size_t num_idle_threads() const;
  std::exception_ptr start_worker() noexcept;
  void start_missing_workers();
  void fail_queue(const std::exception_ptr& error);
  bool are_all_stuck() const;
  void fail_queue_if_all_are_stuck();

  const ProcessMark process_;
  std::shared_ptr<State> state_;
};

}  // namespace pagedlora::internal
