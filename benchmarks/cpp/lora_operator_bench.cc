// A decode step of 16 rows, each with its own adapter, on weights that no cache holds.
//
// SmolLM2-135M's shapes; ranks 8 to 64, half of the adapters on {q, v}, half on all linear
// layers: 214 MB of bfloat16 weights a step. Several fleets of such adapters take turns, so that
// a step finds its weights in memory. Beside each step the same bytes are summed, as a bound.
// Rounds are interleaved; medians of the thread's CPU time are printed as one line of JSON, with
// ratios against that bound.
//
// Usage: lora_operator_bench [rounds]
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "pagedlora/lora_operator.h"

namespace pagedlora {
namespace {

constexpr std::uint32_t kRows = 16;
constexpr std::uint32_t kLayers = 30;
constexpr std::size_t kPageBytes = 92160;
constexpr std::size_t kFleetsBytes = 640'000'000;  // at least; twice the last-level cache here
constexpr std::array<std::uint32_t, 8> kRanks = {8, 16, 32, 64, 16, 32, 64, 64};

LoraModelConfig smollm2(Dtype dtype) {
  struct Shape {
    const char* name;
    std::int64_t in;
    std::int64_t out;
  };
  constexpr std::array<Shape, 7> shapes = {{{"q", 576, 576},
                                            {"k", 576, 192},
                                            {"v", 576, 192},
                                            {"o", 576, 576},
                                            {"gate", 576, 1536},
                                            {"up", 576, 1536},
                                            {"down", 1536, 576}}};
  std::vector<LoraModule> modules;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const Shape& shape : shapes) {
      modules.push_back({std::to_string(layer) + "." + shape.name, static_cast<std::int32_t>(layer),
                         -1, shape.in, shape.out});
    }
  }
  return {std::move(modules), dtype, 64};
}

class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    madvise(at, bytes, MADV_HUGEPAGE);
    base_ = static_cast<std::byte*>(at);
    // +-2^-5 times 1 to 2, whether read as bfloat16 or as float32.
    auto* halves = reinterpret_cast<std::uint16_t*>(base_);
    std::uint32_t state = 12345;
    for (std::size_t i = 0; i < bytes / 2; ++i) {
      state = state * 1664525U + 1013904223U;
      halves[i] = static_cast<std::uint16_t>(0x3D00U | ((state >> 16) & 0x807FU));
    }
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { munmap(base_, bytes_); }

  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

// Fleets of kRows adapters, one after the other in one arena.
class Fleets {
 public:
  explicit Fleets(Dtype dtype) : dtype_(dtype) {
    const LoraModelConfig config = smollm2(dtype);
    const LayoutParams params{kPageBytes, element_bytes(dtype), 0};
    for (std::uint32_t row = 0; row < kRows; ++row) {
      const std::uint32_t rank = kRanks[row / 2];
      std::vector<RowShape> rows;
      for (std::uint32_t module = 0; module < config.modules().size(); ++module) {
        if (row % 2 == 0 || module % 7 == 0 || module % 7 == 2) {
          rows.push_back({ModuleIndex{module}, rank});
        }
      }
      layouts_.push_back(std::make_unique<Layout>(config, rows, params));
      pages_per_fleet_ += layouts_.back()->num_pages();
      payload_bytes_ += layouts_.back()->payload_bytes();
    }
    num_fleets_ = (kFleetsBytes + fleet_bytes() - 1) / fleet_bytes();
    arena_ = std::make_unique<Arena>(num_fleets_ * fleet_bytes());
    pages_.resize(num_fleets_ * pages_per_fleet_);
    for (std::uint32_t page = 0; page < pages_.size(); ++page) {
      pages_[page] = PageId{page};
    }
    scales_.assign(config.modules().size(), 0.5F);
  }

  LoraBatch batch(std::size_t fleet) const {
    std::vector<LoraBatch::Segment> segments;
    const PageId* pages = pages_.data() + fleet * pages_per_fleet_;
    for (const auto& layout : layouts_) {
      segments.push_back(
          {TaskPages{layout.get(), pages, scales_.data(), arena_->base(), kPageBytes, dtype_}, 1});
      pages += layout->num_pages();
    }
    return LoraBatch(segments);
  }

  std::size_t size() const { return num_fleets_; }
  std::size_t payload_bytes() const { return payload_bytes_; }
  std::size_t fleet_bytes() const { return pages_per_fleet_ * kPageBytes; }
  const std::byte* fleet(std::size_t index) const { return arena_->base() + index * fleet_bytes(); }

 private:
  std::vector<std::unique_ptr<Layout>> layouts_;
  std::vector<PageId> pages_;
  std::vector<float> scales_;
  std::unique_ptr<Arena> arena_;
  std::size_t pages_per_fleet_ = 0;
  std::size_t payload_bytes_ = 0;
  Dtype dtype_;
  std::size_t num_fleets_ = 0;
};

template <class Body>
double milliseconds(const Body& body) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  const double start = now();
  body();
  return now() - start;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

using Words = std::uint64_t __attribute__((vector_size(64), aligned(64)));

[[gnu::always_inline]] inline std::uint64_t sum_words(const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kAhead = 128;  // cache lines
  const auto* words = reinterpret_cast<const Words*>(from);
  Words sums[4] = {};
  for (std::size_t i = 0; i + 4 <= bytes / sizeof(Words); i += 4) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      __builtin_prefetch(words + i + lane + kAhead);
      sums[lane] += words[i + lane];
    }
  }
  sums[0] += sums[1] + sums[2] + sums[3];
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    total += sums[0][i];
  }
  return total;
}

[[gnu::target("avx512f")]] std::uint64_t read_avx512(const std::byte* from, std::size_t bytes) {
  return sum_words(from, bytes);
}

std::uint64_t read_portable(const std::byte* from, std::size_t bytes) {
  return sum_words(from, bytes);
}

struct Result {
  double step_ms;
  double read_ms;
};

Result measure(const Fleets& fleets, Dtype activations, Dtype weights, Isa isa, int rounds) {
  std::vector<std::byte> x(std::size_t{kRows} * 1536 * 4);
  std::vector<std::byte> y(x.size());
  LoraOperator lora(weights, isa);
  std::vector<double> steps;
  std::vector<double> reads;
  volatile std::uint64_t sink = 0;
  const auto read = best_isa() == Isa::avx512 ? &read_avx512 : &read_portable;
  std::size_t next = 0;
  for (int round = 0; round < rounds; ++round) {
    const LoraBatch batch = fleets.batch(next++ % fleets.size());
    steps.push_back(milliseconds([&] {
      for (std::uint32_t module = 0; module < kLayers * 7; ++module) {
        lora.apply(batch, ModuleIndex{module},
                   {x.data(), y.data(), 1536, 1536, kRows, activations});
      }
    }));
    const std::byte* other = fleets.fleet(next++ % fleets.size());
    reads.push_back(milliseconds([&] { sink = sink + read(other, fleets.payload_bytes()); }));
  }
  return {median(steps), median(reads)};
}

void print_case(const Fleets& fleets, Dtype activations, Dtype weights, Isa isa, int rounds,
                bool first) {
  const Result result = measure(fleets, activations, weights, isa, rounds);
  const double megabytes = static_cast<double>(fleets.payload_bytes()) / 1e6;
  std::printf(
      "%s{\"activations\": \"%s\", \"weights\": \"%s\", \"isa\": \"%s\", \"weights_mb\": %.1f, "
      "\"step_ms\": %.2f, \"read_ms\": %.2f, \"gb_per_s\": %.1f, \"step_over_read\": %.3f}",
      first ? "" : ", ", std::string(dtype_name(activations)).c_str(),
      std::string(dtype_name(weights)).c_str(), std::string(isa_name(isa)).c_str(), megabytes,
      result.step_ms, result.read_ms, megabytes / result.step_ms, result.step_ms / result.read_ms);
}

void run(int rounds) {
  std::printf(
      "{\"benchmark\": \"lora_operator_decode\", \"rows\": %u, \"rounds\": %d, \"cases\": [", kRows,
      rounds);
  bool first = true;
  for (const Dtype weights : {Dtype::bfloat16, Dtype::float32}) {
    const Fleets fleets(weights);
    for (const Dtype activations : {Dtype::bfloat16, Dtype::float32}) {
      for (const Isa isa : kIsas) {
        if (isa <= best_isa()) {
          print_case(fleets, activations, weights, isa, rounds, first);
          first = false;
        }
      }
    }
  }
  std::printf("]}\n");
}

}  // namespace
}  // namespace pagedlora

int main(int argc, char** argv) {
  pagedlora::run(argc > 1 ? std::atoi(argv[1]) : 31);
  return 0;
}
