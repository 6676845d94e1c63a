// What a model offers to LoRA: its modules and their sizes.
//
// A module is one layer that can carry a LoRA (model.layers.3.self_attn.q_proj). The order of
// the modules is the order of the model's layers; ModuleIndex counts in it.
//
// Immutable after construction; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pagedlora/dtype.h"
#include "pagedlora/ids.h"

namespace pagedlora {

// What a module does with its input: linear multiplies it, an embedding takes it as row numbers. An
// embedding's in_features is the size of its vocabulary.
enum class ModuleKind : std::uint8_t { linear, embedding };

struct LoraModule {
  std::string name;
  std::int32_t layer_id = -1;   // -1: belongs to no decoder layer (lm_head)
  std::int32_t module_id = -1;  // TensorRT-LLM's id of this kind of module; -1: it has none
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  ModuleKind kind = ModuleKind::linear;

  friend bool operator==(const LoraModule&, const LoraModule&) = default;
};

class LoraModelConfig {
 public:
  // Throws InvalidArgumentError for an empty list, a repeated name, a size below 1 or over
  // 2^30, or a maximum rank outside 1..kMaxRank.
  LoraModelConfig(std::vector<LoraModule> modules, Dtype dtype, std::int32_t max_lora_rank);

  const std::vector<LoraModule>& modules() const { return modules_; }
  const LoraModule& module(ModuleIndex index) const { return modules_.at(index.value); }
  std::optional<ModuleIndex> find(std::string_view name) const;
  Dtype dtype() const { return dtype_; }
  std::int32_t max_lora_rank() const { return max_lora_rank_; }

  // Tells configurations with other modules apart: a hash of all names and sizes, in order.
  std::uint64_t fingerprint() const { return fingerprint_; }

  static constexpr std::int32_t kMaxRank = 1024;

 private:
  std::vector<LoraModule> modules_;
  std::unordered_map<std::string, std::uint32_t> index_by_name_;
  Dtype dtype_;
  std::int32_t max_lora_rank_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace pagedlora
