// A manager over CudaDevice and the runtime of cuda_fake/; batches whose kernels read the pages.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_fixture.h"
#include "pagedlora/cuda/cuda_device.h"
#include "peft_fixture.h"

namespace pagedlora::testing_support {

class CudaCacheTest : public PeftTest {
 protected:
  CudaCacheTest() { fake_cuda::reset(); }

  void make_cuda_manager(std::size_t host_pages, std::size_t device_pages) {
    make_manager_over(cuda::make_cuda_device(), host_pages, device_pages);
  }
  TaskId add_new(std::uint64_t request, std::uint32_t pages) {
    const TaskId task = register_adapter(pages);
    add(request, task);
    return task;
  }

  void ensure_and_close_on(std::initializer_list<std::uint64_t> requests,
                           const ComputeStream& stream) {
    ensure(requests)->close(stream.get());
  }

  // As the GPU sees the pages of a lease.
  static TaskPages on_gpu(TaskPages pages) {
    pages.base = fake_cuda::backing(pages.base);
    pages.is_cpu_readable = true;
    return pages;
  }
  bool gpu_holds(const BatchLease& lease, std::uint64_t request) {
    const BatchLease::LeasedTask* leased = lease.find(RequestId{request});
    return leased != nullptr &&
           holds_adapter(on_gpu(leased->pages), *config_, adapters_.at(leased->task));
  }

  // A kernel of a batch: when it is let go, it looks whether it reads the adapter of its request.
  class Kernel {
   public:
    Kernel(CudaCacheTest& test, const ComputeStream& stream, const BatchLease& lease,
           std::uint64_t request) {
      gate_.close();
      const BatchLease::LeasedTask& leased = *lease.find(RequestId{request});
      const std::vector<PageId> pages(leased.pages.pages,
                                      leased.pages.pages + leased.layout->num_pages());
      stream.launch([this, view = on_gpu(leased.pages), pages, layout = leased.layout,
                     adapter = test.adapters_.at(leased.task), config = test.config_]() mutable {
        gate_.pass();
        view.pages = pages.data();
        view.layout = layout.get();
        view.scales = adapter.plan->scales().data();
        read_right_ = holds_adapter(view, *config, adapter);
        is_over_ = true;
      });
    }
    ~Kernel() { let_go(); }
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    bool is_over() const { return is_over_; }
    void open() { gate_.open(); }
    void wait_until_it_runs() { gate_.wait_for_begun(1); }
    // Lets it go, waits for it, and says whether all that it read was right.
    bool let_go() {
      gate_.open();
      EXPECT_TRUE(becomes_true([&] { return is_over_.load(); }));
      return read_right_;
    }

   private:
    fake::Gate gate_;
    std::atomic<bool> is_over_{false};
    std::atomic<bool> read_right_{false};
  };

  // Lets kernels go in their order, each so late that somebody may want its pages before.
  class SlowGpu {
   public:
    ~SlowGpu() {
      ends_ = true;
      thread_.join();
    }
    void add(std::shared_ptr<Kernel> kernel) {
      const std::scoped_lock lock(mutex_);
      waiting_.push_back(std::move(kernel));
    }

   private:
    std::shared_ptr<Kernel> next() {
      const std::scoped_lock lock(mutex_);
      if (waiting_.empty()) {
        return nullptr;
      }
      std::shared_ptr<Kernel> kernel = waiting_.front();
      waiting_.pop_front();
      return kernel;
    }
    void run() {
      while (!ends_) {
        const std::shared_ptr<Kernel> kernel = next();
        for (int i = 0; i < 500; ++i) {
          std::this_thread::yield();
        }
        if (kernel != nullptr) {
          kernel->open();
        }
      }
    }

    std::mutex mutex_;
    std::deque<std::shared_ptr<Kernel>> waiting_;
    std::atomic<bool> ends_{false};
    std::thread thread_{[this] { run(); }};
  };
};

}  // namespace pagedlora::testing_support
