#include "pagedlora/lora_module.h"

#include <string>
#include <string_view>
#include <utility>

#include "internal/printable.h"
#include "pagedlora/errors.h"

namespace pagedlora {
namespace {

constexpr std::int64_t kMaxFeatures = std::int64_t{1} << 30;

void check_module(const LoraModule& module) {
  if (module.name.empty()) {
    throw InvalidArgumentError("a LoRA module needs a name");
  }
  for (const std::int64_t features : {module.in_features, module.out_features}) {
    if (features < 1 || features > kMaxFeatures) {
      throw InvalidArgumentError("module " + internal::in_quotes(module.name) + " has " +
                                 std::to_string(features) + " features; 1 to " +
                                 std::to_string(kMaxFeatures) + " are possible");
    }
  }
}

// FNV-1a.
class Hasher {
 public:
  void add(std::uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001B3U; }
  void add(std::string_view text) {
    add(text.size());
    for (const char character : text) {
      add(static_cast<std::uint64_t>(static_cast<unsigned char>(character)));
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325U;
};

}  // namespace

LoraModelConfig::LoraModelConfig(std::vector<LoraModule> modules, Dtype dtype,
                                 std::int32_t max_lora_rank)
    : modules_(std::move(modules)), dtype_(dtype), max_lora_rank_(max_lora_rank) {
  if (modules_.empty()) {
    throw InvalidArgumentError("a LoRA model configuration needs at least one module");
  }
  if (max_lora_rank < 1 || max_lora_rank > kMaxRank) {
    throw InvalidArgumentError("max_lora_rank is " + std::to_string(max_lora_rank) + "; 1 to " +
                               std::to_string(kMaxRank) + " are possible");
  }
  index_by_name_.reserve(modules_.size());
  Hasher hasher;
  for (std::uint32_t i = 0; i < modules_.size(); ++i) {
    check_module(modules_[i]);
    if (!index_by_name_.emplace(modules_[i].name, i).second) {
      throw InvalidArgumentError("module " + internal::in_quotes(modules_[i].name) +
                                 " is listed twice");
    }
    hasher.add(modules_[i].name);
    hasher.add(static_cast<std::uint64_t>(modules_[i].in_features));
    hasher.add(static_cast<std::uint64_t>(modules_[i].out_features));
    hasher.add(static_cast<std::uint64_t>(modules_[i].kind));
  }
  fingerprint_ = hasher.value();
}

std::optional<ModuleIndex> LoraModelConfig::find(std::string_view name) const {
  const auto found = index_by_name_.find(std::string(name));
  if (found == index_by_name_.end()) {
    return std::nullopt;
  }
  return ModuleIndex{found->second};
}

}  // namespace pagedlora
