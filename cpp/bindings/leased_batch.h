// A batch table together with the lease that keeps its pages in place.
#pragma once

#include <memory>
#include <shared_mutex>

#include "pagedlora/batch_lease.h"
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

}  // namespace pagedlora::bindings
