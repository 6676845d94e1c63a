#include "pagedlora/cuda/scatter_list.h"

#include <algorithm>
#include <cstring>

#include "body/memory_access.h"
#include "body/scatter_rows.h"

namespace pagedlora::cuda {
namespace {

ScatterMode mode_of(const ScatterDescriptor& d) {
  const std::size_t group = kVectorBytes / element_bytes(d.target_dtype);
  const std::size_t alignment = std::min(kVectorBytes, group * element_bytes(d.source_dtype));
  const bool is_aligned_everywhere =
      is_multiple(d.target, kVectorBytes) && is_multiple(d.source, alignment) &&
      (d.rows == 1 || (d.columns % group == 0 && d.source_stride_bytes % alignment == 0));
  return is_aligned_everywhere ? ScatterMode::vectors : ScatterMode::elements;
}

}  // namespace

std::uint32_t num_units(const ScatterDescriptor& d) {
  if (d.mode == ScatterMode::columns) {
    return d.columns;
  }
  const std::uint32_t elements = d.rows * d.columns;
  if (d.mode != ScatterMode::vectors) {
    return elements;
  }
  const auto group = static_cast<std::uint32_t>(kVectorBytes / element_bytes(d.target_dtype));
  return (elements + group - 1) / group;
}

void ScatterList::add(std::span<const ScatterCopy> copies, const std::byte* chunk,
                      const TaskPages& target, std::uint32_t overflow_word) {
  for (const ScatterCopy& copy : copies) {
    ScatterDescriptor d{};
    d.source = chunk + copy.at;
    d.target = target.address(copy.part) + copy.offset_bytes;
    d.source_stride_bytes = copy.source_stride_bytes;
    d.rows = copy.rows;
    d.columns = copy.columns;
    d.target_stride = copy.target_stride;
    d.report = copy.matrix + 1;
    d.overflow_word = overflow_word;
    d.source_dtype = copy.source_dtype;
    d.target_dtype = copy.target_dtype;
    d.source_is_aligned = is_multiple(d.source, element_bytes(d.source_dtype));
    const bool transposed = copy.target_stride != 0;
    if (!transposed &&
        copy.source_stride_bytes == std::size_t{copy.columns} * element_bytes(copy.source_dtype)) {
      d.columns *= d.rows;  // the rows are one run on both sides
      d.rows = 1;
    }
    d.mode = transposed ? ScatterMode::columns : mode_of(d);
    const auto index = static_cast<std::uint32_t>(descriptors_.size());
    const std::uint32_t step = ScatterRows::units_per_tile(d.mode);
    const std::uint32_t units = num_units(d);
    for (std::uint32_t unit = 0; unit < units; unit += step) {
      tiles_.push_back({index, unit});
    }
    descriptors_.push_back(d);
  }
}

void ScatterList::clear() {
  descriptors_.clear();
  tiles_.clear();
}

std::size_t ScatterList::image_bytes() const {
  return descriptors_.size() * sizeof(ScatterDescriptor) + tiles_.size() * sizeof(ScatterTile);
}

void ScatterList::write_image(std::byte* into) const {
  if (empty()) {
    return;
  }
  const std::size_t descriptor_bytes = descriptors_.size() * sizeof(ScatterDescriptor);
  std::memcpy(into, descriptors_.data(), descriptor_bytes);
  std::memcpy(into + descriptor_bytes, tiles_.data(), tiles_.size() * sizeof(ScatterTile));
}

ScatterWork ScatterList::work_of(const std::byte* image, std::uint32_t* overflow_words) const {
  const std::byte* tiles = image + descriptors_.size() * sizeof(ScatterDescriptor);
  return {reinterpret_cast<const ScatterDescriptor*>(image),
          reinterpret_cast<const ScatterTile*>(tiles), static_cast<std::uint32_t>(tiles_.size()),
          overflow_words};
}

}  // namespace pagedlora::cuda
