// Runs kernel bodies on the host as run_body.cuh runs them on the device: nested loops over blocks,
// rounds, phases and threads. The end of the loop over threads is the barrier.
//
// With a generator, blocks and the threads of every phase come in random order: what depends on an
// order that the device does not promise gives other results then. `before_run` is called whenever a
// thread goes on, before it has waited for the stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "body/kernel_index.h"

namespace pagedlora::testing_support {

inline std::vector<std::uint32_t> all_of(std::uint32_t count) {
  std::vector<std::uint32_t> all(count);
  std::iota(all.begin(), all.end(), 0U);
  return all;
}

template <class Body>
void run_block_on_host(const Body& body, cuda::KernelIndex index, std::mt19937* order,
                       const std::function<void()>& before_run) {
  const auto shared = std::make_unique<typename Body::Shared>();
  std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(*shared));
  std::vector<typename Body::Thread> threads;
  for (std::uint32_t thread = 0; thread < Body::kThreads; ++thread) {
    index.thread = thread;
    threads.push_back(body.start(index));
  }
  const std::uint32_t rounds = body.rounds(threads.front());
  for (const typename Body::Thread& thread : threads) {
    ASSERT_EQ(body.rounds(thread), rounds) << "threads of one block must meet at every barrier";
  }
  for (std::uint32_t round = 0; round < rounds; ++round) {
    for (std::uint32_t phase = 0; phase < Body::kPhases; ++phase) {
      if (order != nullptr) {
        std::shuffle(threads.begin(), threads.end(), *order);
      }
      for (const typename Body::Thread& thread : threads) {
        if (before_run) {
          before_run();
        }
        body.run(phase, round, thread, *shared);
      }
    }
  }
}

template <class Body>
void run_on_host(const Body& body, std::uint32_t blocks_x, std::uint32_t blocks_y,
                 std::mt19937* order = nullptr, const std::function<void()>& before_run = {}) {
  std::vector<std::uint32_t> blocks = all_of(blocks_x * blocks_y);
  if (order != nullptr) {
    std::shuffle(blocks.begin(), blocks.end(), *order);
  }
  for (const std::uint32_t block : blocks) {
    run_block_on_host(body, {block % blocks_x, block / blocks_x, 0}, order, before_run);
  }
}

}  // namespace pagedlora::testing_support
