// The devices of the core keep the contract.
#include "device_contract.h"
#include "fake_device.h"

namespace pagedlora::testing_support {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Core, DeviceContractTest,
    ::testing::Values(DeviceMaker{.name = "host", .make = make_host_device},
                      DeviceMaker{.name = "fake",
                                  .make = [] { return std::make_shared<FakeDevice>(); },
                                  .exhaust =
                                      [](Device& device) {
                                        static_cast<FakeDevice&>(device).refuse_allocations = true;
                                      }},
                      DeviceMaker{.name = "fake_host_memory",
                                  .make = [] { return std::make_shared<FakeDevice>(true); },
                                  .exhaust =
                                      [](Device& device) {
                                        static_cast<FakeDevice&>(device).refuse_allocations = true;
                                      }}),
    name_of);

}  // namespace
}  // namespace pagedlora::testing_support
