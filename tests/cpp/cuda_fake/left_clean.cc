// After every test of the program, also one that fails: whatever was asked of the runtime was
// right, and has been undone.
#include <gtest/gtest.h>

#include "fake_cuda.h"

namespace pagedlora::fake_cuda {
namespace {

class RuntimeIsLeftClean final : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& /*test*/) override {
    EXPECT_EQ(violations(), std::vector<std::string>());
    const Live left = live();
    EXPECT_EQ(left.streams, 0U);
    EXPECT_EQ(left.events, 0U);
    EXPECT_EQ(left.device_allocations, 0U);
    EXPECT_EQ(left.host_allocations, 0U);
    EXPECT_EQ(num_pending_errors(), 0) << "an error was not taken back";
    reset();
  }
};

[[maybe_unused]] const bool is_listening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new RuntimeIsLeftClean);
  return true;
}();

}  // namespace
}  // namespace pagedlora::fake_cuda
