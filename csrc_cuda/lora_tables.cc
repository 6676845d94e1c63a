#include "pagedlora/cuda/lora_tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "pagedlora/errors.h"

namespace pagedlora::cuda {
namespace {

static_assert(sizeof(PageId) == sizeof(std::uint32_t));

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = RangeAllocator::kAlignment;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Header, tiles and order of the largest batch.
std::size_t batch_bytes(const LoraTableCapacity& capacity) {
  const std::size_t per_token = sizeof(LoraTile) + sizeof(std::uint32_t);
  return aligned(sizeof(LoraHeader) + capacity.max_tokens * per_token);
}

std::size_t tasks_bytes(const LoraTableCapacity& capacity) {
  return aligned(capacity.max_tasks * sizeof(LoraTaskEntry));
}

std::size_t num_parts(const Layout& layout) {
  std::size_t parts = 0;
  for (const Block& block : layout.blocks()) {
    parts += block.num_a_parts + block.num_b_parts;
  }
  for (std::uint32_t row = 0; row < layout.rows().size(); ++row) {
    parts += layout.bias_parts(row).size() + layout.dora_scale_parts(row).size();
  }
  return parts;
}

// Where the arrays of a layout lie, from its first byte on.
struct LayoutOffsets {
  explicit LayoutOffsets(const Layout& layout)
      : rows(layout.num_modules() * sizeof(LoraModuleEntry)),
        blocks(aligned(rows + layout.rows().size() * sizeof(LoraRowEntry))),
        parts(aligned(blocks + layout.blocks().size() * sizeof(LoraBlockEntry))),
        end(parts + num_parts(layout) * sizeof(Part)) {}

  std::size_t rows;
  std::size_t blocks;
  std::size_t parts;
  std::size_t end;
};

std::vector<LoraModuleEntry> module_entries(const Layout& layout) {
  std::vector<LoraModuleEntry> modules;
  std::uint32_t block = 0;
  for (std::uint32_t module = 0; module < layout.num_modules(); ++module) {
    const auto [first, end] = layout.rows_of({module});
    LoraModuleEntry entry{first, end - first, block, 0};
    for (std::uint32_t row = first; row < end; ++row) {
      entry.num_blocks += static_cast<std::uint32_t>(layout.blocks_of_row(row).size());
    }
    block += entry.num_blocks;
    modules.push_back(entry);
  }
  return modules;
}

// Rows, blocks and their parts, which the entries name by position.
struct LayoutEntries {
  explicit LayoutEntries(const Layout& layout) {
    for (std::uint32_t row = 0; row < layout.rows().size(); ++row) {
      add_row(layout, row);
    }
  }

  std::vector<LoraRowEntry> rows;
  std::vector<LoraBlockEntry> blocks;
  std::vector<Part> parts;

 private:
  std::uint32_t add_parts(std::span<const Part> more) {
    const auto first = static_cast<std::uint32_t>(parts.size());
    parts.insert(parts.end(), more.begin(), more.end());
    return first;
  }

  void add_row(const Layout& layout, std::uint32_t row) {
    const RowShape& shape = layout.rows()[row];
    LoraRowEntry entry{};
    entry.in = shape.in;
    entry.out = shape.out;
    entry.first_block = static_cast<std::uint32_t>(blocks.size());
    for (const Block& block : layout.blocks_of_row(row)) {
      const std::span<const Part> a = layout.a_parts(block);
      const std::span<const Part> b = layout.b_parts(block);
      LoraBlockEntry added{};
      added.row = row;
      added.rank_count = block.rank_count;
      added.a = add_parts(a);
      added.num_a_parts = block.num_a_parts;
      added.b = add_parts(b);
      added.num_b_parts = block.num_b_parts;
      added.a_tile = a.front().length;
      added.b_tile = b.front().length;
      blocks.push_back(added);
    }
    entry.num_blocks = static_cast<std::uint32_t>(blocks.size()) - entry.first_block;
    entry.num_bias_parts = static_cast<std::uint32_t>(layout.bias_parts(row).size());
    entry.bias = add_parts(layout.bias_parts(row));
    entry.num_dora_scale_parts = static_cast<std::uint32_t>(layout.dora_scale_parts(row).size());
    entry.dora_scale = add_parts(layout.dora_scale_parts(row));
    rows.push_back(entry);
  }
};

std::size_t checked_bytes(const LoraTableCapacity& capacity) {
  if (capacity.max_tokens == 0 || capacity.max_tasks == 0 || capacity.max_blocks == 0 ||
      capacity.layout_bytes == 0 || capacity.residency_bytes == 0) {
    throw InvalidArgumentError("every capacity of LoraTables must be at least 1");
  }
  const std::size_t bytes = batch_bytes(capacity) + tasks_bytes(capacity) +
                            aligned(capacity.layout_bytes) + aligned(capacity.residency_bytes);
  if (bytes > std::numeric_limits<std::uint32_t>::max()) {
    throw InvalidArgumentError("LoraTables of " + std::to_string(bytes) +
                               " bytes; the most is 4 GiB");
  }
  return bytes;
}

template <class T>
std::uint32_t as_offset(T offset) {
  return static_cast<std::uint32_t>(offset);
}

}  // namespace

LoraTables::LoraTables(const LoraTableCapacity& capacity, Dtype weights)
    : capacity_(capacity),
      weights_(weights),
      tasks_offset_(batch_bytes(capacity)),
      bytes_(checked_bytes(capacity)),
      layout_room_(tasks_offset_ + tasks_bytes(capacity), aligned(capacity.layout_bytes)),
      residency_room_(tasks_offset_ + tasks_bytes(capacity) + aligned(capacity.layout_bytes),
                      aligned(capacity.residency_bytes)),
      slots_(capacity.max_tasks),
      tokens_of_slot_(capacity.max_tasks, 0) {
  // set_batch allocates nothing for its own tables, so that it cannot stop half-way.
  batch_slots_.reserve(capacity.max_tasks);
  order_.reserve(capacity.max_tokens);
  batch_.reserve(batch_bytes(capacity));
}

std::size_t LoraTables::layout_bytes(const Layout& layout) { return LayoutOffsets(layout).end; }

std::size_t LoraTables::residency_bytes(const Layout& layout) {
  return aligned(layout.num_pages() * sizeof(std::uint32_t)) + layout.rows().size() * sizeof(float);
}

void LoraTables::check(const TaskPages& task, const Layout& layout) const {
  if (task.dtype != weights_) {
    throw InvalidArgumentError("pages of " + std::string(dtype_name(task.dtype)) +
                               " given to LoraTables for " + std::string(dtype_name(weights_)));
  }
  for (const LoraModuleEntry& module : module_entries(layout)) {
    if (module.num_blocks > capacity_.max_blocks) {
      throw InvalidArgumentError("a module has " + std::to_string(module.num_blocks) +
                                 " blocks of ranks, max_blocks is " +
                                 std::to_string(capacity_.max_blocks));
    }
  }
}

std::optional<std::uint32_t> LoraTables::try_add_task(const TaskPages& task,
                                                      const std::shared_ptr<const Layout>& layout) {
  check(task, *layout);
  const auto slot = std::ranges::find(slots_, false, &Slot::is_used);
  if (slot == slots_.end()) {
    return std::nullopt;
  }
  const std::optional<std::size_t> residency = residency_room_.try_claim(residency_bytes(*layout));
  if (!residency) {
    return std::nullopt;
  }
  const std::optional<std::size_t> stored = find_or_store(layout);
  if (!stored) {
    residency_room_.release(*residency, residency_bytes(*layout));
    return std::nullopt;
  }
  ++layouts_[*stored].num_tasks;
  *slot = {*stored, *residency, true};
  const auto index = static_cast<std::uint32_t>(slot - slots_.begin());
  const std::size_t scales = *residency + aligned(layout->num_pages() * sizeof(std::uint32_t));
  write(*residency, task.pages, layout->num_pages() * sizeof(std::uint32_t));
  write(scales, task.scales, layout->rows().size() * sizeof(float));

  const std::size_t at = layouts_[*stored].offset;
  const LayoutOffsets offsets(*layout);
  LoraTaskEntry entry{};
  entry.pool = task.base;
  entry.page_bytes = task.page_bytes;
  entry.num_modules = as_offset(layout->num_modules());
  entry.modules = as_offset(at);
  entry.rows = as_offset(at + offsets.rows);
  entry.blocks = as_offset(at + offsets.blocks);
  entry.parts = as_offset(at + offsets.parts);
  entry.pages = as_offset(*residency);
  entry.scales = as_offset(scales);
  write(tasks_offset_ + index * sizeof(LoraTaskEntry), &entry, sizeof(entry));
  return index;
}

void LoraTables::remove_task(std::uint32_t slot) {
  if (slot >= slots_.size() || !slots_[slot].is_used) {
    throw InvalidArgumentError("slot " + std::to_string(slot) + " of LoraTables holds no task");
  }
  StoredLayout& stored = layouts_[slots_[slot].layout];
  residency_room_.release(slots_[slot].residency, residency_bytes(*stored.layout));
  --stored.num_tasks;
  stored.last_use = ++uses_;
  slots_[slot] = {};
}

std::optional<std::size_t> LoraTables::find_or_store(const std::shared_ptr<const Layout>& layout) {
  const auto known = std::ranges::find(layouts_, layout, &StoredLayout::layout);
  if (known != layouts_.end()) {
    return static_cast<std::size_t>(known - layouts_.begin());
  }
  const std::size_t bytes = layout_bytes(*layout);
  std::optional<std::size_t> offset = layout_room_.try_claim(bytes);
  while (!offset && drop_idle_layout()) {
    offset = layout_room_.try_claim(bytes);
  }
  if (!offset) {
    return std::nullopt;
  }
  write_layout(*layout, *offset);
  auto place = std::ranges::find(layouts_, nullptr, &StoredLayout::layout);
  if (place == layouts_.end()) {
    place = layouts_.insert(place, StoredLayout{});
  }
  *place = {layout, *offset, 0, 0};
  return static_cast<std::size_t>(place - layouts_.begin());
}

// The one whose last task left first; false if every layout has tasks.
bool LoraTables::drop_idle_layout() {
  StoredLayout* oldest = nullptr;
  for (StoredLayout& stored : layouts_) {
    const bool is_idle = stored.layout != nullptr && stored.num_tasks == 0;
    if (is_idle && (oldest == nullptr || stored.last_use < oldest->last_use)) {
      oldest = &stored;
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  layout_room_.release(oldest->offset, layout_bytes(*oldest->layout));
  *oldest = {};
  return true;
}

void LoraTables::write_layout(const Layout& layout, std::size_t offset) {
  const LayoutOffsets offsets(layout);
  const std::vector<LoraModuleEntry> modules = module_entries(layout);
  const LayoutEntries entries(layout);
  const auto write_all = [&]<class T>(std::size_t at, const std::vector<T>& records) {
    write(offset + at, records.data(), records.size() * sizeof(T));
  };
  write_all(0, modules);
  write_all(offsets.rows, entries.rows);
  write_all(offsets.blocks, entries.blocks);
  write_all(offsets.parts, entries.parts);
}

// Fills order_ with the positions of tokens that have a task, those of one task together, and
// batch_slots_ with the slots in that order. tokens_of_slot_ is where a slot's tokens end in it then.
void LoraTables::order_tokens(std::span<const Segment> segments, std::size_t num_tokens) {
  batch_slots_.clear();
  for (const Segment& segment : segments) {
    if (segment.slot && segment.num_tokens > 0) {
      std::uint32_t& tokens = tokens_of_slot_[*segment.slot];
      if (tokens == 0) {
        batch_slots_.push_back(*segment.slot);
      }
      tokens += segment.num_tokens;
    }
  }
  order_.resize(num_tokens);
  std::uint32_t next = 0;
  for (const std::uint32_t slot : batch_slots_) {
    next += tokens_of_slot_[slot];
    tokens_of_slot_[slot] = next - tokens_of_slot_[slot];  // where its next token goes
  }
  std::uint32_t position = 0;
  for (const Segment& segment : segments) {
    for (std::uint32_t i = 0; i < segment.num_tokens; ++i, ++position) {
      if (segment.slot) {
        order_[tokens_of_slot_[*segment.slot]++] = position;
      }
    }
  }
}

std::size_t LoraTables::check_batch(std::span<const Segment> segments,
                                    std::uint32_t tokens_per_tile) const {
  std::size_t num_tokens = 0;
  for (const Segment& segment : segments) {
    if (segment.slot && (*segment.slot >= slots_.size() || !slots_[*segment.slot].is_used)) {
      throw InvalidArgumentError("a segment names slot " + std::to_string(*segment.slot) +
                                 " of LoraTables, which holds no task");
    }
    num_tokens += segment.slot ? segment.num_tokens : 0;
  }
  if (num_tokens > capacity_.max_tokens || tokens_per_tile == 0) {
    throw InvalidArgumentError("a batch of " + std::to_string(num_tokens) + " tokens in tiles of " +
                               std::to_string(tokens_per_tile) + "; max_tokens is " +
                               std::to_string(capacity_.max_tokens));
  }
  return num_tokens;
}

void LoraTables::set_batch(std::span<const Segment> segments, std::uint32_t tokens_per_tile) {
  const std::size_t num_tokens = check_batch(segments, tokens_per_tile);
  order_tokens(segments, num_tokens);
  batch_.resize(sizeof(LoraHeader));
  num_tiles_ = 0;
  std::uint32_t first = 0;
  for (const std::uint32_t slot : batch_slots_) {
    const std::uint32_t end = tokens_of_slot_[slot];
    for (; first < end; first += std::min(tokens_per_tile, end - first), ++num_tiles_) {
      const LoraTile tile{slot, first, std::min(tokens_per_tile, end - first), 0};
      const auto* bytes = reinterpret_cast<const std::byte*>(&tile);
      batch_.insert(batch_.end(), bytes, bytes + sizeof(tile));
    }
    tokens_of_slot_[slot] = 0;
  }
  const LoraHeader header{num_tiles_, as_offset(num_tokens), as_offset(batch_.size()), 0};
  std::memcpy(batch_.data(), &header, sizeof(header));
  const auto* order = reinterpret_cast<const std::byte*>(order_.data());
  batch_.insert(batch_.end(), order, order + num_tokens * sizeof(std::uint32_t));
  write(0, batch_.data(), batch_.size());
}

void LoraTables::write(std::size_t offset, const void* from, std::size_t bytes) {
  if (bytes > 0 && std::memcmp(bytes_.data() + offset, from, bytes) != 0) {
    std::memcpy(bytes_.data() + offset, from, bytes);
    changes_.push_back({offset, bytes});
  }
}

std::vector<LoraTables::Change> LoraTables::take_changes() {
  std::ranges::sort(changes_, {}, &Change::offset);
  std::vector<Change> merged;
  for (const Change& change : changes_) {
    if (!merged.empty() && change.offset <= merged.back().offset + merged.back().bytes) {
      Change& last = merged.back();
      last.bytes = std::max(last.bytes, change.offset + change.bytes - last.offset);
    } else {
      merged.push_back(change);
    }
  }
  changes_.clear();
  return merged;
}

LoraTablesView LoraTables::view(const std::byte* base) const {
  return {base, as_offset(tasks_offset_), capacity_.max_tokens, capacity_.max_blocks, weights_};
}

}  // namespace pagedlora::cuda
