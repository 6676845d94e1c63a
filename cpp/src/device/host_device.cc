#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "pagedlora/copy_2d.h"
#include "pagedlora/device.h"
#include "pagedlora/dtype.h"

namespace pagedlora {
namespace {

// The kernel's estimate of what can be allocated without swapping; 0 if it does not say.
std::size_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  std::size_t kibibytes = 0;
  std::string unit;
  while (meminfo >> key >> kibibytes) {
    if (key == "MemAvailable:") {
      return kibibytes * 1024;
    }
    std::getline(meminfo, unit);
  }
  return 0;
}

// An adapter is larger than the caches: the stores of copy_2d, which bypass them, spare reading
// every target line before it is written. Two thirds of the time of memcpy.
void copy_runs(std::span<const CopyRun> runs) {
  constexpr std::size_t kWordBytes = element_bytes(Dtype::float32);
  std::vector<Copy2d> copies;
  copies.reserve(runs.size());
  for (const CopyRun& run : runs) {
    const std::size_t rest = run.bytes % kWordBytes;
    const std::size_t body = run.bytes - rest;
    copies.push_back({run.source, body, run.target, nullptr, 1, body / kWordBytes});
    std::memcpy(run.target + body, run.source + body, rest);
  }
  // Equal types are copied byte for byte, so nothing overflows.
  static_cast<void>(copy_2d(copies, Dtype::float32, Dtype::float32));
}

class HostDevice final : public Device {
 public:
  std::string_view name() const override { return "cpu"; }

  MemoryInfo memory_info() const override {
    struct sysinfo info = {};
    ::sysinfo(&info);
    const std::size_t unit = info.mem_unit;
    const std::size_t available = available_bytes();
    return {available != 0 ? available : info.freeram * unit, info.totalram * unit};
  }

  std::byte* try_allocate(std::size_t bytes) override {
    // MAP_NORESERVE is not given: an arena that the system cannot back must fail here.
    void* arena =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) {
      return nullptr;
    }
    ::madvise(arena, bytes, MADV_HUGEPAGE);  // best effort
    return static_cast<std::byte*>(arena);
  }

  void deallocate(std::byte* arena, std::size_t bytes) noexcept override { ::munmap(arena, bytes); }

  void prefault(std::byte* begin, std::size_t bytes) noexcept override {
#ifdef MADV_POPULATE_WRITE
    ::madvise(begin, bytes, MADV_POPULATE_WRITE);
#else
    static_cast<void>(begin);
    static_cast<void>(bytes);
#endif
  }

  bool is_host_memory() const override { return true; }

  void copy_from_host(std::span<const CopyRun> runs) override { copy_runs(runs); }
  void copy_to_host(std::span<const CopyRun> runs) override { copy_runs(runs); }
};

}  // namespace

std::shared_ptr<Device> Device::host_tier_device() { return make_host_device(); }

std::shared_ptr<Device> make_host_device() { return std::make_shared<HostDevice>(); }

}  // namespace pagedlora
