// What is leased: a batch table with the lease that keeps its pages in place; a request's task.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <string>

#include "pagedlora/batch_lease.h"
#include "pagedlora/errors.h"
#include "pagedlora/lora_operator.h"

namespace pagedlora::bindings {

struct LeasedBatch {
  LoraBatch batch;
  std::shared_ptr<BatchLease> lease;  // null: only base model rows

  // Keeps the pages in place for as long as the result lives. Throws LeaseClosedError.
  [[nodiscard]] std::shared_lock<std::shared_mutex> hold_open() const {
    return lease == nullptr ? std::shared_lock<std::shared_mutex>() : lease->hold_open();
  }
};

// As BatchLease::find for who holds the lease open, which find() would do again. Throws
// RequestNotLeasedError.
// There is none of a null lease.
inline const BatchLease::LeasedTask& held_task(const BatchLease* lease, RequestId request) {
  if (lease != nullptr) {
    const auto requests = lease->requests();
    const auto found = std::ranges::lower_bound(requests, request, std::less<>(),
                                                &BatchLease::LeasedRequest::request);
    if (found != requests.end() && found->request == request) {
      return lease->tasks()[found->position];
    }
  }
  throw RequestNotLeasedError(request);
}

}  // namespace pagedlora::bindings
