// Leases that are used again, so that a batch whose adapters are resident allocates nothing.
//
// A lease that nobody holds any more is closed and comes back here, and so does the block that
// counts its holders. In a child of fork() both are leaked instead: the lock may be held there.
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
#include "pagedlora/process_mark.h"

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
    const auto pool = shared_from_this();
    std::shared_ptr<BatchLease> lease(
        take_lease().release(), [pool](BatchLease* unheld) noexcept { pool->take_back(unheld); },
        BlockAllocator<std::byte>(pool));
    lease->reopen(std::move(release));  // last: what fails before must not call it
    return lease;
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

  std::unique_ptr<BatchLease> take_lease() {
    const std::scoped_lock lock(mutex_);
    if (leases_.empty()) {
      leases_.reserve(++num_leases_);  // so that giving it back cannot fail
      return std::make_unique<BatchLease>(config_, nullptr);
    }
    std::unique_ptr<BatchLease> lease = std::move(leases_.back());
    leases_.pop_back();
    return lease;
  }
  void take_back(BatchLease* unheld) noexcept {
    if (!process_.is_here()) {
      return;
    }
    std::unique_ptr<BatchLease> lease(unheld);
    lease->close();
    const std::scoped_lock lock(mutex_);
    leases_.push_back(std::move(lease));
  }

  void* take_block() {
    const std::scoped_lock lock(mutex_);
    if (blocks_.empty()) {
      blocks_.reserve(++num_blocks_);
      return ::operator new(kBlockBytes);
    }
    void* block = blocks_.back();
    blocks_.pop_back();
    return block;
  }
  void give_block(void* block) noexcept {
    if (!process_.is_here()) {
      return;
    }
    const std::scoped_lock lock(mutex_);
    blocks_.push_back(block);
  }

  const ProcessMark process_;
  std::shared_ptr<const LoraModelConfig> config_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<BatchLease>> leases_;  // that nobody holds
  std::vector<void*> blocks_;
  std::size_t num_leases_ = 0;  // ever made
  std::size_t num_blocks_ = 0;
};

}  // namespace pagedlora::internal
