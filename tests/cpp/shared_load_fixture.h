// Loads that as many threads read as may, each over workers and helpers of its own test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "load_fixture.h"
#include "numbered_readers.h"

namespace pagedlora::testing_support {

using internal::SharedReading;
using internal::WriteGates;

class SharedLoadTest : public LoadFixture {
 protected:
  SharedLoadTest() {
    renew_adapter();
    use_workers(kReaders);
  }
  ~SharedLoadTest() override {
    adapter_.source->gate.open();
    wait_for_helpers();
  }

  static constexpr std::size_t kReaders = WriteGates::kNumGates;
  static constexpr std::size_t kManyChunks = 32;  // 4 pieces

  void renew_adapter() { use_adapter(2048, 2048, 32); }
  std::shared_ptr<SourceLoad> make_shared_load(
      std::optional<std::uint64_t> checksum = std::nullopt) {
    return make_load(host_.target(), checksum, {workers_, helpers_});
  }
  // From now on each reader passes a gate of its own.
  std::shared_ptr<NumberedReaders> number_readers() {
    auto readers = std::make_shared<NumberedReaders>(adapter_.source);
    adapter_.plan = std::make_shared<const AdapterPlan>(*config_, adapter_.plan->rows(), readers);
    return readers;
  }
  void use_workers(std::size_t number, std::size_t chunk_bytes = kChunkBytes) {
    workers_ = std::make_shared<JobPool>(
        board_, clock_, JobPool::Options{number, 1, chunk_bytes, std::chrono::seconds(10)});
    helpers_ = std::make_shared<JobPool>(
        board_, clock_, JobPool::Options{kReaders - 1, 0, chunk_bytes, std::chrono::seconds(10)});
  }
  void start(const std::shared_ptr<Job>& job) {
    locked([&] { workers_->submit(job); });
  }
  // Starts it and waits until so many reads, of less than a piece, were let pass and all readers
  // stand before the next.
  std::shared_ptr<SourceLoad> start_up_to_read(std::size_t number) {
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    let_read(0, number);
    start(load);
    adapter_.source->gate.wait_for_begun(number + kReaders);
    return load;
  }
  // Starts one of the adapter there is, and waits until so many readers stand before their first read.
  std::shared_ptr<SourceLoad> start_with_readers(std::size_t number) {
    const auto load = make_shared_load();
    adapter_.source->gate.close();
    start(load);
    adapter_.source->gate.wait_for_begun(number);
    return load;
  }
  void wait_for_helpers() {
    std::unique_lock lock(board_->mutex);
    EXPECT_TRUE(board_->changed.wait_for(lock, std::chrono::seconds(60),
                                         [&] { return helpers_->num_idle() == kReaders - 1; }));
  }
  std::exception_ptr end_of_all(const std::shared_ptr<Job>& load) {
    const std::exception_ptr error = end_of(load);
    wait_for_helpers();
    return error;
  }

  std::shared_ptr<JobPool> workers_;
  std::shared_ptr<JobPool> helpers_;
};

}  // namespace pagedlora::testing_support
