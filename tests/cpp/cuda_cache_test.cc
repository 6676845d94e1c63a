// The cache over a GPU: pages that are wanted while kernels still read them, victims, refills and
// a GPU that fails (design 3.3: C3, C4; 3.4: L1, L2, L6).
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda_cache_fixture.h"
#include "pagedlora/errors.h"
#include "random_seeds.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using testing_support::becomes_true;
using testing_support::ComputeStream;
using testing_support::CudaCacheTest;
using testing_support::holds;
using testing_support::num_steps;

TEST_F(CudaCacheTest, L1_ABatchIsBroughtToTheGpu) {
  make_cuda_manager(8, 8);
  const TaskId first = add_new(1, 3);
  add_new(2, 2);
  const auto lease = ensure({1, 2});
  EXPECT_TRUE(gpu_holds(*lease, 1));
  EXPECT_TRUE(gpu_holds(*lease, 2));
  EXPECT_TRUE(content_is_right(first, Tier::device)) << "also for who reads it from the CPU";
  EXPECT_TRUE(content_is_right(first, Tier::host));
}

TEST_F(CudaCacheTest, TheHostTierIsPinnedAndCopiesAreBetweenItAndTheGpuAlone) {
  fake_cuda::forbid_pageable_copies();
  make_cuda_manager(6, 4);
  EXPECT_EQ(fake_cuda::live().host_allocations, 1U);
  EXPECT_EQ(fake_cuda::live().device_allocations, 1U);
  for (std::uint64_t request = 1; request <= 3; ++request) {
    add_new(request, 2);
    EXPECT_TRUE(gpu_holds(*ensure({request}), request));
  }
  EXPECT_GT(fake_cuda::counts().copied_runs, 0U);
}

TEST_F(CudaCacheTest, PagesThatLieSideBySideAreOneCopy) {
  make_cuda_manager(8, 8);
  add_new(1, 6);
  EXPECT_TRUE(gpu_holds(*ensure({1}), 1));
  EXPECT_EQ(fake_cuda::counts().copied_runs, 1U);
}

TEST_F(CudaCacheTest, L6_AHostCopyThatWasEvictedIsRefilledFromTheGpu) {
  make_cuda_manager(2, 4);
  const TaskId task = add_new(1, 2);
  ensure_and_close({1});
  done(1);
  manager_->evict_unowned(Tier::host);
  ASSERT_FALSE(on_host(task));
  source_of(task).fail_open = true;
  add(2, task);
  EXPECT_TRUE(content_is_right(task, Tier::host));
  EXPECT_TRUE(gpu_holds(*ensure({2}), 2));
}

TEST_F(CudaCacheTest, L2_KernelsThatStillRunDelayTheWriteOfTheirPages) {
  make_cuda_manager(8, 2);
  add_new(1, 2);
  add_new(2, 2);
  const ComputeStream stream;
  const auto first = ensure({1});
  Kernel kernel(*this, stream, *first, 1);
  first->close(stream.get());
  std::shared_ptr<BatchLease> second;
  std::thread next([&] { second = ensure({2}); });
  EXPECT_TRUE(becomes_true([] { return fake_cuda::counts().copied_runs == 2; }))
      << "the copy is on its stream, behind the kernel";
  EXPECT_TRUE(kernel.let_go()) << "it read what it was launched for";
  next.join();
  EXPECT_TRUE(gpu_holds(*second, 2));
  EXPECT_EQ(fake_cuda::counts().stream_waits, 1U) << "no worker looked again and again";
}

TEST_F(CudaCacheTest, C3_KernelsThatStillRunNeverChangeWhoIsEvicted) {
  for (const bool still_runs : {false, true}) {
    fake_cuda::reset();
    make_cuda_manager(8, 4);
    const TaskId first = add_new(1, 2);
    const TaskId second = add_new(2, 2);
    const TaskId third = add_new(3, 2);
    {
      const ComputeStream stream;
      const auto lease = ensure({1});
      Kernel kernel(*this, stream, *lease, 1);
      if (!still_runs) {
        kernel.let_go();
      }
      lease->close(stream.get());
      ensure_and_close_on({2}, stream);
      std::thread next([&] { ensure({3})->close(stream.get()); });
      EXPECT_TRUE(becomes_true([] { return fake_cuda::counts().copied_runs == 3; }));
      EXPECT_TRUE(kernel.let_go());
      next.join();
      EXPECT_FALSE(on_device(first)) << "the least recently used";
      EXPECT_TRUE(on_device(second));
      EXPECT_TRUE(content_is_right(third, Tier::device));
    }
    manager_->check_invariants();
    manager_.reset();
    adapters_.clear();
  }
}

TEST_F(CudaCacheTest, L2_WithoutAStreamTheNextBatchWaitsForTheGpuAndNobodyElseDoes) {
  make_cuda_manager(8, 2);
  add_new(1, 2);
  add_new(2, 2);
  const ComputeStream stream;
  const auto first = ensure({1});
  Kernel kernel(*this, stream, *first, 1);
  std::thread other([&] {
    becomes_true([] { return fake_cuda::counts().device_synchronisations == 1; });
    manager_->poll();  // C4: no lock is held meanwhile
    EXPECT_EQ(state_of(2), AdapterState::ready);
    EXPECT_FALSE(kernel.is_over());
    kernel.open();
  });
  const auto second = ensure({2});
  other.join();
  EXPECT_TRUE(kernel.is_over());
  EXPECT_TRUE(kernel.let_go());
  EXPECT_FALSE(first->is_open());
  EXPECT_TRUE(gpu_holds(*second, 2));
}

TEST_F(CudaCacheTest, L2_ALeaseIsNotClosedOnAStreamThatIsBeingCaptured) {
  make_cuda_manager(8, 2);
  const TaskId first = add_new(1, 2);
  const TaskId second = add_new(2, 2);
  const ComputeStream stream;
  const auto lease = ensure({1});
  fake_cuda::begin_capture(stream.handle());
  EXPECT_THROW(lease->close(stream.get()), InvalidArgumentError);
  EXPECT_THROW(ensure({2}, false, stream.get()), InvalidArgumentError) << "it closes the lease";
  EXPECT_TRUE(lease->is_open());
  EXPECT_EQ(manager_->open_lease_tasks(), std::vector<TaskId>{first});
  EXPECT_TRUE(gpu_holds(*lease, 1));
  manager_->check_invariants();
  fake_cuda::end_capture(stream.handle());
  const auto next = ensure({2}, false, stream.get());
  EXPECT_FALSE(lease->is_open()) << "closed by the next batch, once it can be";
  EXPECT_TRUE(gpu_holds(*next, 2));
  EXPECT_EQ(manager_->open_lease_tasks(), std::vector<TaskId>{second});
  EXPECT_EQ(fake_cuda::counts().device_synchronisations, 0U);
}

TEST_F(CudaCacheTest, L2_ALeaseThatWasRefusedByAStreamIsClosedOnAnother) {
  make_cuda_manager(8, 2);
  add_new(1, 2);
  const ComputeStream captured;
  const ComputeStream other;
  const auto lease = ensure({1});
  fake_cuda::begin_capture(captured.handle());
  EXPECT_THROW(lease->close(captured.get()), InvalidArgumentError);
  lease->close(other.get());
  EXPECT_FALSE(lease->is_open());
  EXPECT_TRUE(manager_->open_lease_tasks().empty());
  fake_cuda::end_capture(captured.handle());
}

TEST_F(CudaCacheTest, ABatchWithoutAdaptersWaitsForNothing) {
  make_cuda_manager(8, 2);
  ensure({})->close();
  ensure_and_close({});
  EXPECT_EQ(fake_cuda::counts().device_synchronisations, 0U);
}

TEST_F(CudaCacheTest, AGpuThatFailsIsTheErrorOfEveryRequestAndTheManagerGoesOn) {
  make_cuda_manager(8, 4);
  add_new(1, 2);
  const TaskId second = add_new(2, 2);
  ensure_and_close({1});
  fake_cuda::break_gpu(cudaErrorIllegalAddress);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto lease = ensure({2});
    EXPECT_TRUE(holds<GpuUnavailableError>(lease->errors().at(RequestId{2})));
  }
  EXPECT_TRUE(content_is_right(second, Tier::host));
  manager_->check_invariants();
  done(1);
  done(2);
}

// To be run under ThreadSanitizer: the pages that kernels read and that copies write are the same
// bytes to it.
TEST_F(CudaCacheTest, L8_ThreadsWithStreamsOfTheirOwnReadWhatTheyLeased) {
  constexpr std::uint64_t kThreads = 4;
  options_.max_inflight_batches = kThreads;
  make_cuda_manager(24, 8);  // no more than the open leases take
  std::vector<TaskId> tasks;
  for (std::uint64_t i = 0; i < 10; ++i) {
    tasks.push_back(register_adapter(2));
  }
  std::atomic<int> num_wrong{0};
  std::atomic<int> num_batches{0};
  SlowGpu gpu;
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const ComputeStream stream;
      std::vector<std::shared_ptr<Kernel>> kernels;
      std::mt19937 rng(static_cast<unsigned>(thread) + 1);
      for (int step = 0; step < num_steps(300); ++step) {
        const std::uint64_t request = thread * 1000 + static_cast<std::uint64_t>(step);
        manager_->add_request_peft(RequestId{request}, tasks[rng() % tasks.size()]);
        const auto lease = ensure({request});
        if (lease->has_request(RequestId{request})) {
          ++num_batches;
          kernels.push_back(std::make_shared<Kernel>(*this, stream, *lease, request));
          gpu.add(kernels.back());
          lease->close(stream.get());  // it may still read, while others want its pages
        }
        manager_->mark_request_done(RequestId{request});
        if (step % 8 == 0) {
          manager_->evict_unowned(rng() % 2 == 0 ? Tier::host : Tier::device);
        }
      }
      for (const std::shared_ptr<Kernel>& kernel : kernels) {
        num_wrong += kernel->let_go() ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_wrong, 0);
  EXPECT_GT(num_batches, num_steps(800));
  EXPECT_GT(manager_->stats().device.tasks_evicted, 10U);
  EXPECT_GT(fake_cuda::counts().stream_waits, 10U) << "kernels were late";
}

}  // namespace
}  // namespace pagedlora
