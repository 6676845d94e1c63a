// The pages of one task in one tier, held by value: valid for a job that outlives the entry.
//
// Whether they may still be read or written is another question (page_use.h); the memory stays.
#pragma once

#include <memory>
#include <vector>

#include "page_runs.h"
#include "pagedlora/adapter_plan.h"
#include "pagedlora/device.h"
#include "pagedlora/ids.h"
#include "pagedlora/layout.h"

namespace pagedlora::internal {

class OwnTaskPages {
 public:
  // `arena` keeps the memory of the pages alive.
  OwnTaskPages(const TaskPages& pages, std::shared_ptr<const Layout> layout,
               std::shared_ptr<const void> arena)
      : layout_(std::move(layout)),
        arena_(std::move(arena)),
        ids_(pages.pages, pages.pages + layout_->num_pages()),
        view_(pages) {
    view_.layout = layout_.get();
    view_.pages = ids_.data();
    view_.scales = nullptr;  // copies need none
  }
  OwnTaskPages(const OwnTaskPages&) = delete;
  OwnTaskPages& operator=(const OwnTaskPages&) = delete;

  const TaskPages& view() const { return view_; }

 private:
  std::shared_ptr<const Layout> layout_;
  std::shared_ptr<const void> arena_;
  std::vector<PageId> ids_;
  TaskPages view_;
};

// A copy of a task's pages in the CPU's own memory.
class HostCopy {
 public:
  HostCopy(const TaskPages& pages, Device& device)
      : bytes_(pages.layout->num_pages() * pages.page_bytes), view_(pages) {
    for (std::uint32_t page = 0; page < pages.layout->num_pages(); ++page) {
      ids_.push_back(PageId{page});
    }
    view_.pages = ids_.data();
    view_.base = bytes_.data();
    view_.is_cpu_readable = true;
    device.copy_to_host(page_runs(pages, view_));
  }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  const TaskPages& view() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  std::vector<PageId> ids_;
  TaskPages view_;
};

}  // namespace pagedlora::internal
