// A batch's hold on the device copies that it reads: while it is open they are not evicted.
//
// Made by PeftCacheManager::ensure_batch. close() comes after the batch's last read; with one
// batch in flight the next ensure_batch closes it. Views taken from it are invalid afterwards. A
// close that throws leaves it open.
//
// In a child of fork() it is closed: close() does nothing, readers get InvalidArgumentError.
//
// Thread-safe: close() waits for readers that hold hold_open(). While one thread closes it, it is
// closed to all others.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pagedlora/ids.h"
#include "pagedlora/layout.h"
#include "pagedlora/lora_module.h"
#include "pagedlora/process_mark.h"

namespace pagedlora {

class BatchLease {
 public:
  struct LeasedTask {
    TaskId task;
    TaskPages pages;  // points into `layout`
    std::shared_ptr<const Layout> layout;
  };
  struct LeasedRequest {
    RequestId request;
    std::size_t position = 0;  // in tasks()
  };
  using Release = std::function<void(const std::vector<LeasedTask>&, void* stream)>;

  // `release` unpins the tasks, or throws and does not; without a stream it does. It is called by
  // close(), or by the destructor, until it has returned once.
  BatchLease(std::shared_ptr<const LoraModelConfig> config, Release release)
      : config_(std::move(config)), release_(std::move(release)) {}
  ~BatchLease() { close(); }
  BatchLease(const BatchLease&) = delete;
  BatchLease& operator=(const BatchLease&) = delete;

  // Filled by the manager before the lease is handed out; then sort_requests().
  void add_task(const LeasedTask& leased) { tasks_.push_back(leased); }
  void add_request(RequestId request, std::size_t task_position) {
    requests_.push_back({request, task_position});
  }
  void add_error(RequestId request, std::exception_ptr error) {
    errors_.emplace(request, std::move(error));
  }
  void sort_requests();  // and drops repeated ones

  // Empties a closed lease for another batch; keeps its memory.
  void reopen(Release release);

  const std::vector<LeasedTask>& tasks() const { return tasks_; }
  // By request id, each once.
  std::span<const LeasedRequest> requests() const { return requests_; }
  bool has_request(RequestId request) const { return position_of(request) != nullptr; }
  // Requests whose adapter could not be brought in, each with its own error.
  const std::unordered_map<RequestId, std::exception_ptr>& errors() const { return errors_; }

  // nullptr: the request is not in the batch with an adapter. Throws LeaseClosedError after
  // close().
  const LeasedTask* find(RequestId request) const;

  const LoraModelConfig& config() const { return *config_; }
  bool is_open() const;
  void check_open() const;  // throws LeaseClosedError after close()

  // Keeps the lease from being closed for as long as the result lives. Throws LeaseClosedError.
  [[nodiscard]] std::shared_lock<std::shared_mutex> hold_open() const;

  // The batch's reads are over, or are launched on `stream` of the device; idempotent. Throws
  // InvalidArgumentError, with the lease open as before, for a stream that is being captured into a
  // graph. Never throws without a stream.
  void close(void* stream = nullptr);

 private:
  const LeasedRequest* position_of(RequestId request) const;

  ProcessMark process_;
  std::shared_ptr<const LoraModelConfig> config_;
  std::vector<LeasedTask> tasks_;
  std::vector<LeasedRequest> requests_;
  std::unordered_map<RequestId, std::exception_ptr> errors_;
  mutable std::shared_mutex mutex_;
  Release release_;  // empty once closed
};

}  // namespace pagedlora
