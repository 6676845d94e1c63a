// The cache over a GPU whose runtime fails, call by call: nothing leaks, owners and tiers agree,
// and either a retry works or every request is told that the GPU is gone.
#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_cache_fixture.h"
#include "gpu_context.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

using testing_support::ComputeStream;
using testing_support::CudaCacheTest;

class CudaCacheFailureTest : public CudaCacheTest {
 protected:
  // Each request in a batch of its own, with a kernel that may still run when its pages are given
  // away; then one refill of the host tier from the GPU. What fails is an error of its request.
  void run_batches(const ComputeStream& stream) {
    for (std::uint64_t request = 1; request <= 3; ++request) {
      manager_->add_request_peft(RequestId{request}, tasks_[request - 1]);
      manager_->wait_idle(kPatience);
      const auto lease = ensure({request});
      if (!lease->has_request(RequestId{request})) {
        errors_.push_back(lease->errors().at(RequestId{request}));
        continue;
      }
      if (fake_cuda::is_broken()) {
        continue;  // what is there is leased, and no kernel can be launched on it
      }
      Kernel kernel(*this, stream, *lease, request);
      kernel.wait_until_it_runs();
      kernel.open();
      lease->close(stream.get());
      EXPECT_TRUE(kernel.let_go());
    }
    done(3);
    manager_->evict_unowned(Tier::host);
    manager_->add_request_peft(RequestId{3}, tasks_[2]);
    manager_->wait_idle(kPatience);
    EXPECT_EQ(state_of(3), AdapterState::ready) << "from the GPU, or else from its source";
    EXPECT_TRUE(content_is_right(tasks_[2], Tier::host));
    manager_->check_invariants();
  }

  void make_everything() {
    gpu_ = cuda::make_cuda_device();
    make_manager_over(gpu_, 8, 4);
    tasks_.clear();
    for (int i = 0; i < 3; ++i) {
      tasks_.push_back(register_adapter(2));
    }
  }

  void finish_requests() {
    for (std::uint64_t request = 1; request <= 3; ++request) {
      done(request);
    }
    manager_->check_invariants();
  }

  bool is_dead() {
    try {
      static_cast<void>(gpu_->memory_info());
    } catch (const GpuUnavailableError&) {
      return true;
    }
    return false;
  }

  // Forgets the errors so far, which must be of a type.
  void expect_typed_errors() {
    for (const std::exception_ptr& error : std::exchange(errors_, {})) {
      try {
        std::rethrow_exception(error);
      } catch (const GpuUnavailableError&) {
      } catch (const GpuCallError&) {
      } catch (const std::exception& other) {
        ADD_FAILURE() << other.what();
      }
    }
  }

  // The batches with one call failing, then once more. False: there are not so many calls.
  bool run_with_failure(long call, cudaError_t error) {
    fake_cuda::reset();
    make_everything();
    const ComputeStream stream;
    fake_cuda::fail_call_after(call, error);
    run_batches(stream);
    const bool has_failed = fake_cuda::has_failed();
    fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
    finish_requests();
    expect_typed_errors();
    const bool was_dead = is_dead();
    EXPECT_TRUE(has_failed || !was_dead);
    EXPECT_TRUE(was_dead || !cuda::leaves_gpu_unusable(error) || !has_failed);
    run_batches(stream);
    EXPECT_EQ(!errors_.empty(), was_dead) << "a GPU that works serves the retry";
    finish_requests();
    expect_typed_errors();
    manager_.reset();
    gpu_.reset();
    return has_failed;
  }

  std::shared_ptr<Device> gpu_;
  std::vector<TaskId> tasks_;
  std::vector<std::exception_ptr> errors_;
};

TEST_F(CudaCacheFailureTest, AnyCallMayFailOnce) {
  for (const cudaError_t error : {cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
    long call = 0;
    while (run_with_failure(call, error)) {
      ASSERT_FALSE(HasFailure()) << "call " << call;
      ASSERT_EQ(fake_cuda::live(), fake_cuda::Live()) << "call " << call;
      ASSERT_EQ(fake_cuda::num_pending_errors(), 0) << "call " << call;
      ASSERT_LT(++call, 500);
    }
    EXPECT_GT(call, 20);
  }
}

TEST_F(CudaCacheFailureTest, TheGpuMayFailForGoodAtAnyCall) {
  long call = 0;
  while (run_with_failure(call, cudaErrorIllegalAddress)) {
    ASSERT_FALSE(HasFailure()) << "call " << call;
    ASSERT_EQ(fake_cuda::live(), fake_cuda::Live()) << "call " << call;
    ASSERT_EQ(fake_cuda::num_pending_errors(), 0) << "call " << call;
    ASSERT_LT(++call, 500);
  }
  EXPECT_GT(call, 20);
}

TEST_F(CudaCacheFailureTest, AManagerThatCannotBeMadeLeavesNothingBehind) {
  for (const cudaError_t error :
       {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorIllegalAddress}) {
    long call = 0;
    for (bool has_failed = true; has_failed; ++call) {
      fake_cuda::reset();
      fake_cuda::fail_call_after(call, error);
      try {
        make_everything();
      } catch (const OutOfMemoryError&) {
        EXPECT_EQ(error, cudaErrorMemoryAllocation);
      } catch (const GpuUnavailableError&) {
      } catch (const GpuCallError&) {
      }
      has_failed = fake_cuda::has_failed();
      fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
      manager_.reset();
      gpu_.reset();
      ASSERT_EQ(fake_cuda::live(), fake_cuda::Live()) << "call " << call;
      ASSERT_EQ(fake_cuda::num_pending_errors(), 0) << "call " << call;
      ASSERT_LT(call, 100);
    }
    EXPECT_GT(call, 4);
  }
}

}  // namespace
}  // namespace pagedlora
