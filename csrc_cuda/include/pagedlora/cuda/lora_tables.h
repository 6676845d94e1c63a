// The host's copy of what the LoRA kernels read (lora_records.h), and which bytes of it changed.
//
// The buffer's size is fixed at construction, so launches that were captured in a CUDA graph stay
// right: their grid follows from capacities, and a count in the buffer tells the kernels where to
// stop. Per step only the batch is written: 16 bytes per tile and 4 per token. A layout is written
// when the first of its tasks becomes resident, and kept for the next until its room is needed; a
// task's pages and scales once per residency.
//
// Makes no CUDA calls. The owner fills the kernels' buffer with zeros once, and uploads take_changes()
// on the stream of the kernels before it launches them; if the copies read this memory directly,
// nothing here may be changed until they have ended.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pagedlora/cuda/lora_records.h"
#include "pagedlora/cuda/range_allocator.h"
#include "pagedlora/layout.h"

namespace pagedlora::cuda {

struct LoraTableCapacity {
  std::uint32_t max_tokens = 0;  // with an adapter, in one batch
  std::uint32_t max_tasks = 0;   // resident at once
  std::uint32_t max_blocks = 0;  // of one module of one task
  std::size_t layout_bytes = 0;
  std::size_t residency_bytes = 0;
};

class LoraTables {
 public:
  struct Segment {
    std::optional<std::uint32_t> slot;  // nullopt: tokens of the base model
    std::uint32_t num_tokens = 0;
  };
  struct Change {
    std::size_t offset = 0;
    std::size_t bytes = 0;

    friend bool operator==(const Change&, const Change&) = default;
  };

  // Pages hold elements of `weights`. Throws InvalidArgumentError for a capacity of 0 or a buffer
  // over 4 GiB.
  LoraTables(const LoraTableCapacity& capacity, Dtype weights);

  // What one layout, and one task of it, take of the capacities.
  static std::size_t layout_bytes(const Layout& layout);
  static std::size_t residency_bytes(const Layout& layout);

  // Enters a resident task and returns its slot; nothing if slots or room are used up. Addresses
  // in `task` are the device's, but for the page ids and scales, which are copied. Throws
  // InvalidArgumentError for pages of another type, or a module with more than max_blocks blocks.
  std::optional<std::uint32_t> try_add_task(const TaskPages& task,
                                            const std::shared_ptr<const Layout>& layout);

  // Its pages may be another task's then. A batch that names the slot must not be launched again.
  // Throws InvalidArgumentError for a slot that is free.
  void remove_task(std::uint32_t slot);

  // The next launches' tokens, in the order of x and y. Up to `tokens_per_tile` tokens of one task
  // share a pass over its weights: 1 spreads a decode step over the device, more suit prompts.
  // Throws InvalidArgumentError, with the batch unchanged, for a free slot, too many tokens, or 0
  // tokens per tile.
  void set_batch(std::span<const Segment> segments, std::uint32_t tokens_per_tile);

  std::uint32_t num_tiles() const { return num_tiles_; }
  std::span<const std::byte> bytes() const { return bytes_; }

  // What changed since the last call: ascending, apart from each other. At first all is zero.
  std::vector<Change> take_changes();

  // For kernels that find the buffer at `base`, a multiple of 16.
  LoraTablesView view(const std::byte* base) const;

 private:
  struct StoredLayout {
    std::shared_ptr<const Layout> layout;  // null: a free place
    std::size_t offset = 0;
    std::uint32_t num_tasks = 0;
    std::uint64_t last_use = 0;
  };
  struct Slot {
    std::size_t layout = 0;  // in layouts_
    std::size_t residency = 0;
    bool is_used = false;
  };

  void check(const TaskPages& task, const Layout& layout) const;
  std::optional<std::size_t> find_or_store(const std::shared_ptr<const Layout>& layout);
  bool drop_idle_layout();
  void write_layout(const Layout& layout, std::size_t offset);
  std::size_t check_batch(std::span<const Segment> segments, std::uint32_t tokens_per_tile) const;
  void order_tokens(std::span<const Segment> segments, std::size_t num_tokens);
  void write(std::size_t offset, const void* from, std::size_t bytes);

  LoraTableCapacity capacity_;
  Dtype weights_;
  std::size_t tasks_offset_ = 0;
  std::vector<std::byte> bytes_;
  RangeAllocator layout_room_;
  RangeAllocator residency_room_;
  std::vector<StoredLayout> layouts_;
  std::vector<Slot> slots_;
  std::uint64_t uses_ = 0;
  std::uint32_t num_tiles_ = 0;
  std::vector<Change> changes_;

  // Of set_batch, kept for their memory.
  std::vector<std::uint32_t> tokens_of_slot_;  // zero between calls
  std::vector<std::uint32_t> batch_slots_;
  std::vector<std::uint32_t> order_;
  std::vector<std::byte> batch_;
};

}  // namespace pagedlora::cuda
