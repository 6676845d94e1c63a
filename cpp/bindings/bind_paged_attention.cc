#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "isa_argument.h"
#include "pagedlora/errors.h"
#include "pagedlora/paged_attention.h"

namespace pagedlora::bindings {
namespace py = pybind11;
using py::literals::operator""_a;
namespace {

using PyView = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

HeadsView to_view(const PyView& view) {
  return {std::bit_cast<const void*>(std::get<0>(view)), std::get<1>(view), std::get<2>(view)};
}

AttentionBatch make_batch(std::vector<std::vector<std::int32_t>> block_tables,
                          const std::vector<std::int64_t>& past_tokens,
                          const std::vector<std::int64_t>& new_tokens, std::int64_t block_size) {
  if (block_tables.size() != past_tokens.size() || block_tables.size() != new_tokens.size()) {
    throw InvalidArgumentError("block_tables, past_tokens and new_tokens differ in length");
  }
  std::vector<AttentionBatch::Sequence> sequences;
  sequences.reserve(block_tables.size());
  for (std::size_t i = 0; i < block_tables.size(); ++i) {
    sequences.push_back({std::move(block_tables[i]), past_tokens[i], new_tokens[i]});
  }
  return {std::move(sequences), block_size};
}

void run(PagedAttention& self, const AttentionBatch& batch, const PyView& query, const PyView& key,
         const PyView& value, std::uintptr_t output, std::uintptr_t key_cache,
         std::uintptr_t value_cache, std::int64_t num_blocks, std::int32_t num_heads,
         std::int32_t num_kv_heads, std::int32_t key_dim, std::int32_t value_dim, float scaling,
         std::int64_t sliding_window, float softcap, std::uintptr_t sinks, Dtype dtype) {
  const AttentionArgs args{to_view(query),
                           to_view(key),
                           to_view(value),
                           std::bit_cast<void*>(output),
                           std::bit_cast<void*>(key_cache),
                           std::bit_cast<void*>(value_cache),
                           num_blocks,
                           num_heads,
                           num_kv_heads,
                           key_dim,
                           value_dim,
                           scaling,
                           sliding_window,
                           softcap,
                           std::bit_cast<const float*>(sinks),
                           dtype};
  const py::gil_scoped_release release;
  self.run(batch, args);
}

}  // namespace

void register_paged_attention(py::module_& module) {
  py::class_<AttentionBatch>(module, "AttentionBatch",
                             "Block tables and token counts of the sequences of one step.")
      .def(py::init(&make_batch), "block_tables"_a, "past_tokens"_a, "new_tokens"_a, "block_size"_a)
      .def_property_readonly("num_tokens", &AttentionBatch::num_tokens);

  py::class_<PagedAttention>(module, "PagedAttention",
                             "Attention on the CPU over a paged KV cache.")
      .def(py::init([](const std::string& isa) { return PagedAttention(isa_argument(isa)); }),
           "isa"_a = "auto")
      .def("run", &run, "batch"_a, py::kw_only(), "query"_a, "key"_a, "value"_a, "output"_a,
           "key_cache"_a, "value_cache"_a, "num_blocks"_a, "num_heads"_a, "num_kv_heads"_a,
           "key_dim"_a, "value_dim"_a, "scaling"_a, "sliding_window"_a = 0, "softcap"_a = 0.0F,
           "sinks"_a = 0, "dtype"_a,
           "Writes the new keys and values into the cache and attends.\n\n"
           "query, key and value are (pointer, head stride, token stride) of [heads, tokens, dim]\n"
           "views, strides in elements; output is [tokens, num_heads, value_dim], contiguous.");
}

}  // namespace pagedlora::bindings
