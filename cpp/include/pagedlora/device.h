// The memory that a tier's pages live in, and how bytes get there.
//
// A tier asks its device for one arena at construction and copies pages between arenas through
// it. HostDevice is ordinary memory; with it both tiers are RAM and a copy is a memcpy. CudaDevice
// (csrc_cuda) is a GPU. Copies run on the manager's workers, which may be many: a device that has
// streams gives each call one.
//
// Implementations are thread-safe for distinct memory ranges.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "pagedlora/page_use.h"

namespace pagedlora {

struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

// One contiguous piece of a copy between two arenas.
struct CopyRun {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;
  virtual MemoryInfo memory_info() const = 0;

  // An arena aligned to at least 4096 bytes; its content is unspecified. nullptr if there is no
  // room.
  virtual std::byte* try_allocate(std::size_t bytes) = 0;
  virtual void deallocate(std::byte* arena, std::size_t bytes) noexcept = 0;

  // Makes the range cheap to write for the first time. A hint: changes no content, may run beside
  // any other use of the range, may do nothing.
  virtual void prefault(std::byte* begin, std::size_t bytes) noexcept = 0;

  // Whether the CPU may write this device's memory as its own, so that one pass over a source can
  // fill both tiers.
  virtual bool is_host_memory() const { return false; }

  // Whether the CPU may read this device's memory at its addresses.
  virtual bool is_cpu_readable() const { return true; }

  // The device for a host tier beside this one: the memory that copies to here and back are fastest
  // with. Ordinary memory, unless this device wants it otherwise.
  virtual std::shared_ptr<Device> host_tier_device();

  // What has been launched on `stream` so far, as a use of the pages that it reads; nullptr if
  // nothing of it can still be running. Without a stream it is everything on the device, and may be
  // waited for here; that never throws. Throws InvalidArgumentError for a stream whose work is not
  // run but recorded.
  virtual std::shared_ptr<const PageUse> launched_work(void* stream) {
    static_cast<void>(stream);
    return nullptr;
  }

  // Copies host memory into this device's, or back. Returns when the bytes are there, or throws and
  // writes nothing more. May block.
  virtual void copy_from_host(std::span<const CopyRun> runs) = 0;
  virtual void copy_to_host(std::span<const CopyRun> runs) = 0;

  // Whether a copy to this device can be asked for before `use` is over, because the device itself
  // can make it wait.
  virtual bool can_queue_behind(const PageUse& use) const {
    static_cast<void>(use);
    return false;
  }

  // As copy_from_host, but no byte is written before the uses are over. can_queue_behind() each.
  virtual void copy_from_host_behind(const PageUses& uses, std::span<const CopyRun> runs) {
    static_cast<void>(uses);
    copy_from_host(runs);
  }
};

// Ordinary memory. Arenas are whole mappings, so that releasing one gives it back to the system.
std::shared_ptr<Device> make_host_device();

}  // namespace pagedlora
