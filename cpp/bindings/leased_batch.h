// A batch table together with the lease that keeps its pages in place.
#pragma once

#include <memory>

#include "pagedlora/batch_lease.h"
#include "pagedlora/lora_operator.h"

namespace pagedlora::bindings {

struct LeasedBatch {
  LoraBatch batch;
  std::shared_ptr<BatchLease> lease;  // null: only base model rows

  void check_open() const {
    if (lease != nullptr) {
      lease->check_open();
    }
  }
};

}  // namespace pagedlora::bindings
