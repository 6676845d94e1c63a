// The cache from C++: three adapters of one module, room for one of them in the device tier, and the
// right answer from each.
#include <pagedlora/adapter_plan.h>
#include <pagedlora/batch_lease.h>
#include <pagedlora/device.h>
#include <pagedlora/eviction_policy.h>
#include <pagedlora/lora_module.h>
#include <pagedlora/lora_operator.h>
#include <pagedlora/peft_cache_manager.h>
#include <pagedlora/tensor_source.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <span>
#include <vector>

namespace {

using namespace pagedlora;

constexpr std::uint32_t kFeatures = 64;
constexpr std::uint32_t kRank = 4;
constexpr float kScale = 0.5F;

// A [kRank, kFeatures] of ones and B [kFeatures, kRank] of `value`, in memory; files come in by
// open_file_source.
std::shared_ptr<const AdapterPlan> make_adapter(const LoraModelConfig& config, float value) {
  const auto weights = std::make_shared<std::vector<float>>(2 * kRank * kFeatures, 1.0F);
  std::fill(weights->begin() + kRank * kFeatures, weights->end(), value);
  const PlannedRow row{.module = *config.find("layers.0.proj"),
                       .rank = kRank,
                       .a = {.offset = 0, .dtype = Dtype::float32},
                       .b = {.offset = kRank * kFeatures * sizeof(float), .dtype = Dtype::float32},
                       .scale = kScale};
  return std::make_shared<AdapterPlan>(
      config, std::vector{row},
      make_memory_source(std::as_bytes(std::span(*weights)), weights, "example"));
}

// One token through the module's LoRA alone.
float answer(PeftCacheManager& cache, LoraOperator& lora, const LoraModelConfig& config,
             RequestId request) {
  const std::shared_ptr<BatchLease> lease = cache.ensure_batch(std::array{request});
  const BatchLease::LeasedTask* leased = lease->find(request);
  if (leased == nullptr) {
    std::rethrow_exception(lease->errors().at(request));
  }
  const std::vector<float> x(kFeatures, 1.0F);
  std::vector<float> y(kFeatures, 0.0F);
  const LoraBatch::Segment segment{leased->pages, 1};
  lora.apply(LoraBatch(std::span(&segment, 1)), *config.find("layers.0.proj"),
             {.x = x.data(),
              .y = y.data(),
              .x_row_stride = kFeatures,
              .y_row_stride = kFeatures,
              .num_rows = 1});
  lease->close();
  return y[0];
}

}  // namespace

int main() {
  const auto config = std::make_shared<LoraModelConfig>(
      std::vector<LoraModule>{
          {.name = "layers.0.proj", .in_features = kFeatures, .out_features = kFeatures}},
      Dtype::float32, 64);
  PeftCacheOptions options;
  options.page_bytes = 2048;  // one adapter of this example
  options.host_cache_bytes = 2 * options.page_bytes;
  options.device_cache_bytes = options.page_bytes;
  PeftCacheManager cache(config, options, make_host_device(), eviction_policy_factory("lru"));
  LoraOperator lora(config->dtype());

  bool right = true;
  for (const float value : {1.0F, 2.0F, 3.0F}) {
    const TaskId task = cache.register_task(make_adapter(*config, value));
    const RequestId request{static_cast<std::uint64_t>(value)};
    cache.add_request_peft(request, task);
    const float expected = kScale * static_cast<float>(kFeatures) * kRank * value;
    const float got = answer(cache, lora, *config, request);
    right = right && got == expected;
    std::cout << "adapter " << value << ": " << got << ", expected " << expected << "\n";
    cache.mark_request_done(request);
  }
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
