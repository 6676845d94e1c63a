// CudaLoraOperator over leases of a cache on a GPU, against LoraOperator on the same weights.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_cache_fixture.h"
#include "gpu_context.h"
#include "pagedlora/cuda/lora_operator.h"
#include "pagedlora/errors.h"
#include "pagedlora/lora_operator.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using cuda::CudaLoraOperator;
using testing_support::becomes_true;
using testing_support::ComputeStream;
using testing_support::CudaCacheTest;
using testing_support::thrown_by;

constexpr std::uint32_t kFeatures = 8;  // of the fixture's one module
constexpr ModuleIndex kModule{0};

// Floats in the GPU's memory.
class GpuFloats {
 public:
  explicit GpuFloats(const std::vector<float>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(&begin_, count_ * sizeof(float)), cudaSuccess);
    std::memcpy(fake_cuda::backing(begin_), values.data(), count_ * sizeof(float));
  }
  ~GpuFloats() { EXPECT_EQ(cudaFree(begin_), cudaSuccess); }
  GpuFloats(const GpuFloats&) = delete;
  GpuFloats& operator=(const GpuFloats&) = delete;

  void* get() const { return begin_; }
  std::vector<float> values() const {
    std::vector<float> values(count_);
    std::memcpy(values.data(), fake_cuda::backing(begin_), count_ * sizeof(float));
    return values;
  }

 private:
  std::size_t count_;
  void* begin_ = nullptr;
};

class CudaLoraOperatorTest : public CudaCacheTest {
 protected:
  struct Rows {
    std::uint64_t request = 0;  // 0: of the base model
    std::uint32_t count = 0;
  };

  void make_operator(std::uint32_t max_tasks, std::uint32_t max_rows = 64,
                     bool for_graphs = false) {
    lora_ = std::make_unique<CudaLoraOperator>(
        config_, cuda::CudaLoraOptions{.max_rows = max_rows,
                                       .max_tasks = max_tasks,
                                       .layout = manager_->layout_params(),
                                       .for_graphs = for_graphs,
                                       .starts_early = true});
  }

  std::vector<CudaLoraOperator::Segment> segments_of(const BatchLease& lease,
                                                     const std::vector<Rows>& rows) {
    std::vector<CudaLoraOperator::Segment> segments;
    for (const Rows& run : rows) {
      segments.push_back(
          {run.request == 0 ? nullptr : lease.find(RequestId{run.request}), run.count});
    }
    return segments;
  }

  std::vector<float> random(std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = std::uniform_real_distribution<float>(-1, 1)(rng_);
    }
    return values;
  }

  // The same rows by LoraOperator, over what the GPU's pages hold.
  std::vector<float> expected(const BatchLease& lease, const std::vector<Rows>& rows,
                              const std::vector<float>& x, std::vector<float> y) {
    LoraOperator cpu(Dtype::float32);
    std::size_t first = 0;
    for (const Rows& run : rows) {
      if (run.request != 0 && run.count != 0) {
        const LoraBatch::Segment segment{on_gpu(lease.find(RequestId{run.request})->pages),
                                         run.count};
        cpu.apply(LoraBatch(std::span(&segment, 1)), kModule,
                  {x.data() + first * kFeatures, y.data() + first * kFeatures, kFeatures, kFeatures,
                   run.count});
      }
      first += run.count;
    }
    return y;
  }

  // One step: lease, batch, one module; the lease is closed on the stream.
  void step(std::initializer_list<std::uint64_t> requests, const std::vector<Rows>& rows) {
    const auto lease = ensure(requests);
    std::uint32_t num_rows = 0;
    for (const Rows& run : rows) {
      num_rows += run.count;
    }
    const std::vector<float> x = random(std::size_t{num_rows} * kFeatures);
    const std::vector<float> y = random(std::size_t{num_rows} * kFeatures);
    const GpuFloats gpu_x(x);
    const GpuFloats gpu_y(y);
    lora_->set_batch(segments_of(*lease, rows), stream_.get());
    lora_->apply(kModule, {gpu_x.get(), gpu_y.get(), kFeatures, kFeatures, num_rows},
                 stream_.get());
    {
      const cuda::BesideCaptures beside_captures;
      ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.get())), cudaSuccess);
    }
    const std::vector<float> wanted = expected(*lease, rows, x, y);
    const std::vector<float> got = gpu_y.values();
    std::size_t row = 0;
    for (const Rows& run : rows) {
      for (std::size_t i = row * kFeatures; i < (row + run.count) * kFeatures; ++i) {
        if (run.request == 0) {
          EXPECT_EQ(got[i], y[i]) << "row of the base model, element " << i;
        } else {
          EXPECT_NEAR(got[i], wanted[i], 1e-5 * (1 + std::abs(wanted[i]))) << "element " << i;
          EXPECT_NE(got[i], y[i]);
        }
      }
      row += run.count;
    }
    lease->close(stream_.get());
  }

  ComputeStream stream_;
  std::mt19937 rng_{7};
  std::unique_ptr<CudaLoraOperator> lora_;
};

TEST_F(CudaLoraOperatorTest, RowsOfManyAdaptersAndOfTheBaseGetTheirOwn) {
  make_cuda_manager(16, 16);
  make_operator(4);
  for (const std::uint64_t request : {1, 2, 3}) {
    add_new(request, static_cast<std::uint32_t>(request));
  }
  step({1, 2, 3}, {{2, 1}, {0, 2}, {1, 1}, {3, 1}, {2, 1}});
  step({1, 2, 3}, {{2, 9}, {0, 1}, {1, 17}, {3, 5}});
  step({1}, {{0, 3}, {1, 1}});
}

TEST_F(CudaLoraOperatorTest, LaunchesForGraphsAreRightForEveryBatchThatFits) {
  make_cuda_manager(16, 16);
  make_operator(4, 32, true);
  add_new(1, 1);
  add_new(2, 3);
  step({1, 2}, {{2, 1}, {0, 2}, {1, 1}});
  step({1, 2}, {{2, 9}, {1, 23}});
  step({1}, {{0, 5}});
}

TEST_F(CudaLoraOperatorTest, AnAdapterIsFoundWhereItLiesAfterItWasEvicted) {
  make_cuda_manager(16, 4);
  make_operator(8);
  for (const std::uint64_t request : {1, 2, 3}) {
    add_new(request, 2);
  }
  step({1, 2}, {{1, 1}, {2, 1}});
  const PageId before = ensure({1, 2})->find(RequestId{1})->pages.pages[0];
  step({2, 3}, {{2, 1}, {3, 1}});
  step({3, 1}, {{3, 1}, {1, 1}});
  const PageId after = ensure({3, 1})->find(RequestId{1})->pages.pages[0];
  EXPECT_NE(before, after) << "the test is meant for pages that move";
}

TEST_F(CudaLoraOperatorTest, AStepUploadsTheBatchAloneOnceItsTasksAreKnown) {
  make_cuda_manager(16, 16);
  make_operator(4);
  add_new(1, 1);
  add_new(2, 1);
  step({1, 2}, {{1, 1}, {2, 1}});
  step({1, 2}, {{2, 1}, {1, 1}});
  const auto lease = ensure({1, 2});
  const std::size_t before = fake_cuda::counts().copied_runs;
  lora_->set_batch(segments_of(*lease, {{2, 1}, {1, 1}, {0, 1}}), stream_.get());
  EXPECT_LE(fake_cuda::counts().copied_runs - before, 1U);
  EXPECT_EQ(lora_->num_known_tasks(), 2U);
}

TEST_F(CudaLoraOperatorTest, OnceItsTasksAreKnownAStepUploadsFromPinnedMemoryAlone) {
  make_cuda_manager(16, 16);
  make_operator(4);
  add_new(1, 1);
  add_new(2, 1);
  step({1, 2}, {{1, 1}, {2, 1}});
  fake_cuda::forbid_pageable_copies();
  step({1, 2}, {{2, 3}, {0, 1}, {1, 1}});
}

TEST_F(CudaLoraOperatorTest, OfTheTablesOnlyWhatWasWrittenIsUploaded) {
  make_cuda_manager(16, 16);
  make_operator(64, 4096);
  add_new(1, 1);
  const auto lease = ensure({1});
  const std::size_t before = fake_cuda::counts().copied_bytes;
  lora_->set_batch(segments_of(*lease, {{1, 1}}), stream_.get());
  EXPECT_LT(fake_cuda::counts().copied_bytes - before, 2048U);
  EXPECT_GT(lora_->device_bytes(), 100'000U);
}

TEST_F(CudaLoraOperatorTest, LateKernelsReadTheTablesOfTheirOwnBatch) {
  make_cuda_manager(16, 16);
  make_operator(4);
  add_new(1, 1);
  add_new(2, 2);
  step({1, 2}, {{1, 1}, {2, 1}});
  const auto lease = ensure({1, 2});
  const std::vector<float> x = random(2 * kFeatures);
  const std::vector<float> zeros(2 * kFeatures);
  const GpuFloats gpu_x(x);
  const std::vector<std::vector<Rows>> batches{
      {{2, 1}, {1, 1}}, {{1, 1}, {2, 1}}, {{0, 1}, {2, 1}}};
  std::vector<std::unique_ptr<GpuFloats>> results;
  fake::Gate gate;
  gate.close();
  stream_.launch([&] { gate.pass(); });
  const std::size_t waits = fake_cuda::counts().event_waits;
  std::thread host([&] {
    for (const std::vector<Rows>& rows : batches) {
      results.push_back(std::make_unique<GpuFloats>(zeros));
      lora_->set_batch(segments_of(*lease, rows), stream_.get());
      lora_->apply(kModule, {gpu_x.get(), results.back()->get(), kFeatures, kFeatures, 2},
                   stream_.get());
    }
  });
  // The first batch is on the stream, behind what is held; the second waits for its upload.
  EXPECT_TRUE(becomes_true([&] { return fake_cuda::counts().event_waits == waits + 2; }));
  gate.open();
  host.join();
  {
    const cuda::BesideCaptures beside_captures;
    ASSERT_EQ(cudaStreamSynchronize(stream_.handle()), cudaSuccess);
  }
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const std::vector<float> wanted = expected(*lease, batches[i], x, zeros);
    const std::vector<float> got = results[i]->values();
    for (std::size_t k = 0; k < wanted.size(); ++k) {
      EXPECT_NEAR(got[k], wanted[k], 1e-5 * (1 + std::abs(wanted[k]))) << i << ", " << k;
    }
  }
  lease->close(stream_.get());
}

TEST_F(CudaLoraOperatorTest, ABatchIsNotSetOnAStreamThatIsBeingCaptured) {
  make_cuda_manager(16, 16);
  make_operator(4);
  add_new(1, 1);
  const auto lease = ensure({1});
  fake_cuda::begin_capture(stream_.handle());
  EXPECT_THROW(lora_->set_batch(segments_of(*lease, {{1, 1}}), stream_.get()),
               InvalidArgumentError);
  EXPECT_EQ(lora_->num_rows(), 0U);
  fake_cuda::end_capture(stream_.handle());
  lease->close();
  step({1}, {{1, 1}});
}

TEST_F(CudaLoraOperatorTest, TheTaskThatWasUsedLongestAgoIsForgottenForAnother) {
  make_cuda_manager(16, 16);
  make_operator(2);
  for (const std::uint64_t request : {1, 2, 3, 4}) {
    add_new(request, 1);
  }
  step({1, 2}, {{1, 1}, {2, 1}});
  step({3, 2}, {{3, 1}, {2, 1}});
  step({3, 4}, {{4, 1}, {3, 1}});
  step({1}, {{1, 2}});
  EXPECT_EQ(lora_->num_known_tasks(), 2U);
}

TEST_F(CudaLoraOperatorTest, TooManyAdaptersOrRowsAreRefusedAndTheNextBatchIsRight) {
  make_cuda_manager(16, 16);
  make_operator(2, 4);
  for (const std::uint64_t request : {1, 2, 3}) {
    add_new(request, 1);
  }
  {
    const auto lease = ensure({1, 2, 3});
    EXPECT_THROW(lora_->set_batch(segments_of(*lease, {{1, 1}, {2, 1}, {3, 1}}), stream_.get()),
                 InvalidArgumentError);
    EXPECT_THROW(lora_->set_batch(segments_of(*lease, {{1, 2}, {0, 3}}), stream_.get()),
                 InvalidArgumentError);
    EXPECT_EQ(lora_->num_rows(), 0U);
    EXPECT_THROW(lora_->apply(kModule, {nullptr, nullptr, 8, 8, 5}, stream_.get()),
                 InvalidArgumentError)
        << "there is no batch";
  }
  step({3, 1}, {{3, 2}, {1, 1}});
}

TEST_F(CudaLoraOperatorTest, AFailedUploadIsMadeUpForByTheNext) {
  std::set<std::string> failed;
  bool has_failed = true;
  for (long call = 0; has_failed; ++call) {
    SCOPED_TRACE("call " + std::to_string(call));
    make_cuda_manager(16, 16);
    make_operator(4);
    add_new(1, 2);
    add_new(2, 1);
    step({1}, {{1, 1}});
    const auto lease = ensure({1, 2});
    fake_cuda::fail_call_after(call, cudaErrorInvalidValue);
    try {
      lora_->set_batch(segments_of(*lease, {{1, 1}, {2, 1}}), stream_.get());
    } catch (const GpuCallError& error) {
      failed.insert(error.call);
      EXPECT_EQ(lora_->num_rows(), 0U);
    }
    has_failed = fake_cuda::has_failed();
    fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
    lease->close(stream_.get());
    step({1, 2}, {{2, 1}, {1, 1}});
    lora_.reset();
    ASSERT_LT(call, 50);
  }
  for (const char* call : {"cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"}) {
    EXPECT_TRUE(failed.contains(call)) << call;
  }
}

TEST_F(CudaLoraOperatorTest, AnOperatorThatCannotBeMadeLeavesNothingBehind) {
  make_cuda_manager(4, 4);
  const fake_cuda::Live before = fake_cuda::live();
  bool has_failed = true;
  for (long call = 0; has_failed; ++call) {
    fake_cuda::fail_call_after(call, cudaErrorMemoryAllocation);
    try {
      make_operator(2);
    } catch (const GpuCallError&) {
      EXPECT_TRUE(fake_cuda::has_failed());
    }
    has_failed = fake_cuda::has_failed();
    fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
    lora_.reset();
    ASSERT_EQ(fake_cuda::live(), before) << "call " << call;
    ASSERT_LT(call, 50);
  }
}

TEST_F(CudaLoraOperatorTest, ABatchOfBaseRowsLaunchesNothing) {
  make_cuda_manager(4, 4);
  make_operator(1);
  add_new(1, 1);
  step({1}, {{0, 4}});
}

TEST_F(CudaLoraOperatorTest, TheOperatorOfTheCpuRefusesPagesThatItCannotRead) {
  make_cuda_manager(4, 4);
  add_new(1, 1);
  const auto lease = ensure({1});
  const LoraBatch::Segment segment{lease->find(RequestId{1})->pages, 1};
  const std::vector<float> x(kFeatures);
  std::vector<float> y(kFeatures, 2.0F);
  LoraOperator cpu(Dtype::float32);
  EXPECT_THROW(cpu.apply(LoraBatch(std::span(&segment, 1)), kModule,
                         {x.data(), y.data(), kFeatures, kFeatures, 1}),
               InvalidArgumentError);
  EXPECT_EQ(y, std::vector<float>(kFeatures, 2.0F));
}

TEST_F(CudaLoraOperatorTest, WhatDoesNotFitTheBatchOrTheModelIsRefused) {
  make_cuda_manager(4, 4);
  make_operator(1);
  add_new(1, 1);
  const auto lease = ensure({1});
  lora_->set_batch(segments_of(*lease, {{1, 2}}), stream_.get());
  const GpuFloats x(std::vector<float>(2 * kFeatures, 2.0F));
  const GpuFloats y(std::vector<float>(2 * kFeatures, 2.0F));
  using Spoil = void (*)(Activations&);
  for (const auto& [spoil, words] : std::map<Spoil, std::string>{
           {[](Activations& a) { a.num_rows = 3; }, "have 3 rows, the batch has 2"},
           {[](Activations& a) { a.x = nullptr; }, "x is null"},
           {[](Activations& a) { a.y = nullptr; }, "y is null"},
           {[](Activations& a) { a.x_row_stride = 7; }, "the row stride of x is 7 elements"},
           {[](Activations& a) { a.y_row_stride = 7; }, "the row stride of y is 7 elements"},
           {[](Activations& a) { a.dtype = Dtype{9}; }, "a dtype of number 9"}}) {
    Activations activations{x.get(), y.get(), kFeatures, kFeatures, 2};
    spoil(activations);
    const auto error =
        thrown_by<InvalidArgumentError>([&] { lora_->apply(kModule, activations, stream_.get()); });
    ASSERT_TRUE(error) << words;
    EXPECT_NE(std::string(error->what()).find(words), std::string::npos) << error->what();
  }
  const Activations good{x.get(), y.get(), kFeatures, kFeatures, 2};
  EXPECT_THROW(lora_->apply(ModuleIndex{1}, good, stream_.get()), InvalidArgumentError);
  EXPECT_THROW(lora_->apply_embedding(kModule, {nullptr, y.get(), 8, 2}, stream_.get()),
               InvalidArgumentError);
  EXPECT_EQ(y.values(), std::vector<float>(2 * kFeatures, 2.0F));
  EXPECT_THROW(make_operator(0), InvalidArgumentError);
}

}  // namespace
}  // namespace pagedlora
