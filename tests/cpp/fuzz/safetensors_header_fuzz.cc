// libFuzzer target: the input is a whole safetensors file. Seeds are any small adapter files.
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedlora/errors.h"
#include "pagedlora/safetensors_header.h"
#include "pagedlora/tensor_source.h"

namespace {

// Tensors must tile the data section, which ends the file.
void check(const std::vector<pagedlora::TensorHeader>& tensors, std::uint64_t data_start,
           std::uint64_t file_bytes) {
  std::uint64_t end = data_start;
  for (const pagedlora::TensorHeader& tensor : tensors) {
    if (tensor.offset != end || tensor.num_bytes > file_bytes - end) {
      std::abort();
    }
    end += tensor.num_bytes;
  }
  if (end != file_bytes) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const auto tensors =
        pagedlora::read_safetensors_header(*pagedlora::make_memory_source(bytes, nullptr, "fuzz"));
    check(tensors, tensors.empty() ? size : tensors.front().offset, size);
  } catch (const pagedlora::AdapterFormatError&) {
  }
  // The same text as JSON alone, with as much data as its last byte says (32 for padding): finds
  // more paths.
  try {
    const std::string_view json(reinterpret_cast<const char*>(data), size);
    const std::uint64_t data_start = 8 + size;
    const std::uint64_t file_bytes = data_start + (size == 0 ? 0 : data[size - 1]);
    check(pagedlora::parse_safetensors_header(json, file_bytes, "fuzz"), data_start, file_bytes);
  } catch (const pagedlora::AdapterFormatError&) {
  }
  return 0;
}
