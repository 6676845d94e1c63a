// Leases that are used again, so that a batch whose adapters are resident allocates nothing.
//
// A lease that nobody holds any more is closed and comes back here, and so does the block that
// counts its holders.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "pagedlora/batch_lease.h"

namespace pagedlora::internal {

class LeasePool : public std::enable_shared_from_this<LeasePool> {
 public:
  explicit LeasePool(std::shared_ptr<const LoraModelConfig> config) : config_(std::move(config)) {}
  ~LeasePool() {
    for (void* block : blocks_) {
      ::operator delete(block);
    }
  }
  LeasePool(const LeasePool&) = delete;
  LeasePool& operator=(const LeasePool&) = delete;

  // An open, empty lease.
  std::shared_ptr<BatchLease> make(BatchLease::Release release) {
    std::unique_ptr<BatchLease> lease;
    {
      const std::scoped_lock lock(mutex_);
      if (!leases_.empty()) {
        lease = std::move(leases_.back());
        leases_.pop_back();
      }
    }
    if (lease == nullptr) {
      lease = std::make_unique<BatchLease>(config_, std::move(release));
    } else {
      lease->reopen(std::move(release));
    }
    const auto pool = shared_from_this();
    return {lease.release(), [pool](BatchLease* unheld) noexcept { pool->take_back(unheld); },
            BlockAllocator<std::byte>(pool)};
  }

 private:
  static constexpr std::size_t kBlockBytes = 128;

  template <class T>
  class BlockAllocator {
   public:
    using value_type = T;

    explicit BlockAllocator(std::shared_ptr<LeasePool> pool) : pool_(std::move(pool)) {}
    template <class Other>
    BlockAllocator(const BlockAllocator<Other>& other)  // NOLINT: what allocators must offer
        : pool_(other.pool_) {}

    T* allocate(std::size_t /*one*/) {
      static_assert(sizeof(T) <= kBlockBytes && alignof(T) <= alignof(std::max_align_t));
      return static_cast<T*>(pool_->take_block());
    }
    void deallocate(T* block, std::size_t /*one*/) noexcept { pool_->give_block(block); }

    friend bool operator==(const BlockAllocator&, const BlockAllocator&) = default;

   private:
    template <class Other>
    friend class BlockAllocator;
    std::shared_ptr<LeasePool> pool_;
  };

  void take_back(BatchLease* unheld) noexcept {
    std::unique_ptr<BatchLease> lease(unheld);
    lease->close();
    try {
      const std::scoped_lock lock(mutex_);
      leases_.push_back(std::move(lease));
    } catch (const std::bad_alloc&) {  // then it is freed
    }
  }

  void* take_block() {
    const std::scoped_lock lock(mutex_);
    if (blocks_.empty()) {
      return ::operator new(kBlockBytes);
    }
    void* block = blocks_.back();
    blocks_.pop_back();
    return block;
  }

  void give_block(void* block) noexcept {
    try {
      const std::scoped_lock lock(mutex_);
      blocks_.push_back(block);
    } catch (const std::bad_alloc&) {
      ::operator delete(block);
    }
  }

  std::shared_ptr<const LoraModelConfig> config_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<BatchLease>> leases_;
  std::vector<void*> blocks_;
};

}  // namespace pagedlora::internal
