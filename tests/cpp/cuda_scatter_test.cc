// CudaScatter over the runtime of cuda_fake/, against the CPU's executor (design 3.2: one plan, two
// executors, the same bits).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/random_scatter.h"
#include "cuda_fixture.h"
#include "gpu_context.h"
#include "pagedlora/cuda/cuda_scatter.h"
#include "pagedlora/errors.h"
#include "thrown_by.h"

namespace pagedlora {
namespace {

using cuda::CudaScatter;
using cuda::Staging;
using testing_support::ComputeStream;
using testing_support::filled_by_cpu;
using testing_support::kDtypes;
using testing_support::pick;
using testing_support::RandomScatter;
using testing_support::Rng;
using testing_support::seed_label;
using testing_support::seeds;
using testing_support::thrown_by;

constexpr std::size_t kRoomy = std::size_t{16} << 20U;
constexpr std::array kStagings{Staging::pinned, Staging::device};
const auto kScatterSeeds = static_cast<std::uint32_t>(testing_support::num_steps(60));

// Pages on the GPU, with the bytes that filled_by_cpu() begins with.
class GpuPages {
 public:
  explicit GpuPages(std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&begin_, bytes), cudaSuccess);
    poison();
  }
  ~GpuPages() { EXPECT_EQ(cudaFree(begin_), cudaSuccess); }
  GpuPages(const GpuPages&) = delete;
  GpuPages& operator=(const GpuPages&) = delete;

  std::byte* begin() const { return static_cast<std::byte*>(begin_); }
  void poison() { std::memset(fake_cuda::backing(begin_), 0xFF, bytes_); }
  std::vector<std::byte> content() const {
    const std::byte* content = fake_cuda::backing(begin_);
    return {content, content + bytes_};
  }

 private:
  std::size_t bytes_;
  void* begin_ = nullptr;
};

class CudaScatterTest : public ::testing::Test {
 protected:
  // An adapter, what reads it, and its pages.
  struct Target {
    Target(Dtype cache_dtype, Rng& rng, std::uint32_t small_modules = 0)
        : dtype(cache_dtype),
          adapter(cache_dtype, pick(rng, 0, 2) != 0, rng, small_modules),
          pages(adapter.pool_bytes()) {}

    CudaScatter::Adapter get() {
      reader = adapter.source->open();
      TaskPages view = adapter.view_at(pages.begin());
      view.is_cpu_readable = false;
      return {*adapter.scatter, *reader, view};
    }
    bool is_right() const { return pages.content() == filled_by_cpu(adapter, dtype); }
    // Puts a value beyond float16 into some matrix; false if all are float16 already.
    bool overflow() {
      for (const PlannedRow& row : adapter.plan->rows()) {
        if (row.b.dtype != Dtype::float16) {
          testing_support::store(adapter.source->bytes.data() + row.b.offset, row.b.dtype, -1e30F);
          return true;
        }
      }
      return false;
    }

    Dtype dtype;
    RandomScatter adapter;
    GpuPages pages;
    std::unique_ptr<SourceReader> reader;
  };
  using Targets = std::vector<std::unique_ptr<Target>>;

  static Targets make_targets(std::size_t count, Dtype dtype, Rng& rng) {
    Targets targets;
    while (targets.size() < count) {
      targets.push_back(std::make_unique<Target>(dtype, rng));
    }
    return targets;
  }

  void make_scatter(std::size_t staging_bytes, Staging staging) {
    scatter_ = std::make_unique<CudaScatter>(
        cuda::CudaScatterOptions{.staging_bytes = staging_bytes, .staging = staging});
  }

  std::vector<CudaScatter::Outcome> execute(const Targets& targets) {
    std::vector<CudaScatter::Adapter> adapters;
    for (const auto& target : targets) {
      adapters.push_back(target->get());
    }
    return scatter_->execute(adapters, stream_.get());
  }

  static std::size_t launches() { return fake_cuda::counts().scatter_launches; }
  static std::size_t enqueued() { return launches() + fake_cuda::counts().copied_runs; }

  ComputeStream stream_;
  std::unique_ptr<CudaScatter> scatter_;
};

TEST_F(CudaScatterTest, AdaptersThatFitTheStagingAreFilledByOneLaunchAsTheCpuDoes) {
  for (const std::uint32_t seed : seeds(kScatterSeeds)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    make_scatter(kRoomy, kStagings[seed % 2]);
    const Targets targets = make_targets(pick(rng, 1, 4), kDtypes[seed % 3], rng);
    const std::size_t before = launches();
    const auto outcomes = execute(targets);
    EXPECT_EQ(launches() - before, 1U);
    EXPECT_EQ(scatter_->num_launches(), 1U);
    ASSERT_EQ(outcomes.size(), targets.size());
    for (std::size_t i = 0; i < targets.size(); ++i) {
      EXPECT_EQ(outcomes[i].error, nullptr);
      EXPECT_EQ(outcomes[i].source_bytes, targets[i]->adapter.scatter->source_bytes());
      ASSERT_TRUE(targets[i]->is_right()) << "adapter " << i;
    }
  }
}

TEST_F(CudaScatterTest, AStagingThatIsSmallerThanAnAdapterTakesMoreLaunches) {
  std::size_t more = 0;
  for (const std::uint32_t seed : seeds(kScatterSeeds)) {
    SCOPED_TRACE(seed_label(seed));
    Rng rng(seed);
    const std::size_t staging_bytes = ScatterPlan::kMinChunkBytes + pick(rng, 0, 60'000);
    make_scatter(staging_bytes, kStagings[seed % 2]);
    const Targets targets = make_targets(pick(rng, 1, 3), kDtypes[seed % 3], rng);
    const std::size_t before = launches();
    std::size_t bytes = 0;
    for (const CudaScatter::Outcome& outcome : execute(targets)) {
      EXPECT_EQ(outcome.error, nullptr);
      bytes += outcome.source_bytes;
    }
    EXPECT_GE((launches() - before) * staging_bytes, bytes);
    EXPECT_EQ(scatter_->num_launches(), launches() - before);
    more += launches() - before - 1;
    for (const auto& target : targets) {
      ASSERT_TRUE(target->is_right());
    }
  }
  EXPECT_GT(more, 0U);
}

// All of it fits the staging.
TEST_F(CudaScatterTest, PiecesBeyondTheListOfALaunchTakeMoreLaunches) {
  for (const Staging staging : kStagings) {
    Rng rng(1);
    make_scatter(std::size_t{1} << 20U, staging);
    Targets targets;
    targets.push_back(std::make_unique<Target>(Dtype::bfloat16, rng, 700));
    const std::size_t before = launches();
    const auto outcomes = execute(targets);
    EXPECT_LT(outcomes[0].source_bytes, std::size_t{1} << 20U);
    EXPECT_GT(launches() - before, 1U);
    EXPECT_EQ(outcomes[0].error, nullptr);
    EXPECT_TRUE(targets[0]->is_right());
  }
}

TEST_F(CudaScatterTest, AdaptersBeyondTheOverflowWordsOfALaunchTakeAnother) {
  Rng rng(2);
  make_scatter(kRoomy, Staging::device);
  Targets targets;
  for (int i = 0; i < 70; ++i) {
    targets.push_back(std::make_unique<Target>(Dtype::float16, rng, 4));
  }
  ASSERT_TRUE(targets.back()->overflow());
  const auto outcomes = execute(targets);
  EXPECT_EQ(launches(), 2U);
  for (std::size_t i = 0; i + 1 < targets.size(); ++i) {
    EXPECT_EQ(outcomes[i].error, nullptr);
    EXPECT_TRUE(targets[i]->is_right()) << "adapter " << i;
  }
  EXPECT_NE(outcomes.back().error, nullptr);
}

TEST_F(CudaScatterTest, AnOverflowIsTheOutcomeOfItsAdapterAndTheOthersAreFilled) {
  for (const Staging staging : kStagings) {
    for (const std::size_t staging_bytes : {kRoomy, std::size_t{20'000}}) {
      Rng rng(3);
      make_scatter(staging_bytes, staging);
      Targets targets = make_targets(4, Dtype::float16, rng);
      ASSERT_TRUE(targets[2]->overflow());
      const auto outcomes = execute(targets);
      for (const std::size_t i : {0U, 1U, 3U}) {
        EXPECT_EQ(outcomes[i].error, nullptr);
        EXPECT_TRUE(targets[i]->is_right());
      }
      ASSERT_NE(outcomes[2].error, nullptr);
      const auto by_gpu =
          thrown_by<AdapterFormatError>([&] { std::rethrow_exception(outcomes[2].error); });
      const auto by_cpu = thrown_by<AdapterFormatError>(
          [&] { static_cast<void>(filled_by_cpu(targets[2]->adapter, Dtype::float16)); });
      EXPECT_STREQ(by_gpu.value().what(), by_cpu.value().what());
    }
  }
}

TEST_F(CudaScatterTest, AReadThatFailsIsTheOutcomeOfItsAdapterAndTheOthersAreFilled) {
  Rng rng(4);
  make_scatter(40'000, Staging::device);
  const Targets targets = make_targets(3, Dtype::bfloat16, rng);
  targets[1]->adapter.source->fail_read_after = 0;
  const auto outcomes = execute(targets);
  EXPECT_EQ(outcomes[0].error, nullptr);
  EXPECT_EQ(outcomes[2].error, nullptr);
  EXPECT_TRUE(targets[0]->is_right());
  EXPECT_TRUE(targets[2]->is_right());
  EXPECT_EQ(outcomes[1].source_bytes, 0U);
  EXPECT_THROW(std::rethrow_exception(outcomes[1].error), AdapterReadError);
}

TEST_F(CudaScatterTest, ACallThatFailsLeavesNothingRunningAndTheNextScatterIsRight) {
  for (const Staging staging : kStagings) {
    Rng rng(5);
    make_scatter(30'000, staging);
    const Targets targets = make_targets(2, Dtype::float32, rng);
    std::set<std::string> failed;
    bool has_failed = true;
    for (long call = 0; has_failed; ++call) {
      SCOPED_TRACE("call " + std::to_string(call));
      stream_.launch([] {  // so late that what is behind it is not over by chance
        for (int i = 0; i < 500; ++i) {
          std::this_thread::yield();
        }
      });
      const std::size_t before = enqueued();
      fake_cuda::fail_call_after(call, cudaErrorInvalidValue);
      try {
        execute(targets);
      } catch (const GpuCallError& error) {
        failed.insert(error.call);
        EXPECT_TRUE(fake_cuda::is_idle() || enqueued() == before);
      }
      has_failed = fake_cuda::has_failed();
      fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
      for (const auto& target : targets) {
        target->pages.poison();
      }
      for (const CudaScatter::Outcome& outcome : execute(targets)) {
        EXPECT_EQ(outcome.error, nullptr);
      }
      for (const auto& target : targets) {
        ASSERT_TRUE(target->is_right());
      }
      ASSERT_LT(call, 500);
    }
    EXPECT_EQ(failed,
              (std::set<std::string>{"cudaMemcpyAsync", "cudaPointerGetAttributes", "cudaSetDevice",
                                     "cudaStreamIsCapturing", "cudaStreamSynchronize", "scatter"}));
  }
}

TEST_F(CudaScatterTest, AGpuThatDiesIsReportedNowAndEverAfter) {
  Rng rng(6);
  make_scatter(kRoomy, Staging::device);
  const Targets targets = make_targets(1, Dtype::bfloat16, rng);
  stream_.launch([] { fake_cuda::break_gpu(cudaErrorIllegalAddress); });
  EXPECT_THROW(execute(targets), GpuUnavailableError);
  EXPECT_THROW(execute(targets), GpuUnavailableError);
  EXPECT_THROW(scatter_->repeat(stream_.get()), GpuUnavailableError);
  scatter_.reset();
  fake_cuda::break_gpu(cudaSuccess);
}

TEST_F(CudaScatterTest, PagesOfTheHostAndAStreamThatIsCapturedAreRefused) {
  Rng rng(7);
  make_scatter(kRoomy, Staging::pinned);
  const Targets targets = make_targets(1, Dtype::bfloat16, rng);
  fake_cuda::begin_capture(stream_.handle());
  EXPECT_THROW(execute(targets), InvalidArgumentError);
  fake_cuda::end_capture(stream_.handle());
  CudaScatter::Adapter on_host = targets[0]->get();
  std::vector<std::byte> pages(targets[0]->adapter.pool_bytes());
  on_host.target.base = pages.data();
  EXPECT_THROW(scatter_->execute({&on_host, 1}, stream_.get()), InvalidArgumentError);
  EXPECT_EQ(targets[0]->adapter.source->reads, 0);
  EXPECT_THROW(make_scatter(ScatterPlan::kMinChunkBytes - 1, Staging::pinned),
               InvalidArgumentError);
}

TEST_F(CudaScatterTest, ALaunchCanBeRepeated) {
  for (const Staging staging : kStagings) {
    Rng rng(8);
    make_scatter(kRoomy, staging);
    scatter_->repeat(stream_.get());
    const Targets targets = make_targets(2, Dtype::float16, rng);
    execute(targets);
    for (const auto& target : targets) {
      target->pages.poison();
    }
    const std::size_t before = launches();
    scatter_->repeat(stream_.get());
    {
      const cuda::BesideCaptures beside_captures;
      ASSERT_EQ(cudaStreamSynchronize(stream_.handle()), cudaSuccess);
    }
    EXPECT_EQ(launches() - before, 1U);
    for (const auto& target : targets) {
      EXPECT_TRUE(target->is_right());
    }
  }
}

TEST_F(CudaScatterTest, NothingToScatterLaunchesNothing) {
  make_scatter(kRoomy, Staging::device);
  EXPECT_TRUE(execute({}).empty());
  EXPECT_EQ(launches(), 0U);
}

TEST_F(CudaScatterTest, OneThatCannotBeMadeLeavesNothingBehind) {
  const fake_cuda::Live before = fake_cuda::live();
  bool has_failed = true;
  for (long call = 0; has_failed; ++call) {
    fake_cuda::fail_call_after(call, cudaErrorMemoryAllocation);
    try {
      make_scatter(kRoomy, Staging::device);
    } catch (const GpuCallError&) {
      EXPECT_TRUE(fake_cuda::has_failed());
    }
    has_failed = fake_cuda::has_failed();
    fake_cuda::fail_call_after(fake_cuda::kNever, cudaSuccess);
    scatter_.reset();
    ASSERT_EQ(fake_cuda::live(), before) << "call " << call;
    ASSERT_LT(call, 50);
  }
}

}  // namespace
}  // namespace pagedlora
