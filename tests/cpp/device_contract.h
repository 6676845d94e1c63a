// What every Device promises (device.h), as one suite over whatever makes devices.
//
// A device is a row of DeviceMakers in an INSTANTIATE_TEST_SUITE_P of DeviceContractTest. Pages are
// read and written by copies alone, so that the memory need not be the CPU's.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "pagedlora/device.h"

namespace pagedlora::testing_support {

struct DeviceMaker {
  std::string name;
  std::function<std::shared_ptr<Device>()> make;
  // Asked of try_allocate to see it refuse; the device may be told to refuse instead.
  std::function<void(Device&)> exhaust = [](Device&) {};
  std::function<bool()> is_there = [] { return true; };
};

inline void PrintTo(const DeviceMaker& maker, std::ostream* out) { *out << maker.name; }

inline std::string name_of(const ::testing::TestParamInfo<DeviceMaker>& info) {
  return info.param.name;
}

// An arena of the device, given back at the end of the test.
class Arena {
 public:
  Arena(std::shared_ptr<Device> device, std::size_t bytes)
      : device_(std::move(device)), bytes_(bytes), memory_(device_->try_allocate(bytes)) {}
  ~Arena() {
    if (memory_ != nullptr) {
      device_->deallocate(memory_, bytes_);
    }
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* begin() const { return memory_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  std::size_t bytes_;
  std::byte* memory_;
};

// Bytes that differ from their neighbours and from those of other seeds.
std::vector<std::byte> pattern(std::size_t bytes, unsigned seed);

class DeviceContractTest : public ::testing::TestWithParam<DeviceMaker> {
 protected:
  void SetUp() override {
    if (!GetParam().is_there()) {
      GTEST_SKIP() << "there is no " << GetParam().name;
    }
    device_ = GetParam().make();
  }

  // One run each.
  void write(const Arena& arena, std::size_t at, std::span<const std::byte> bytes) {
    device_->copy_from_host(std::vector<CopyRun>{{bytes.data(), arena.begin() + at, bytes.size()}});
  }
  std::vector<std::byte> read(const Arena& arena, std::size_t at, std::size_t bytes) {
    std::vector<std::byte> content(bytes, std::byte{0x55});
    device_->copy_to_host(std::vector<CopyRun>{{arena.begin() + at, content.data(), bytes}});
    return content;
  }

  std::shared_ptr<Device> device_;
};

}  // namespace pagedlora::testing_support
