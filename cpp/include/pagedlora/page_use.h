// Something that reads or writes pages for a while after the cache has given them to somebody else.
//
// Evicting a task takes its pages at once, whatever still goes on in them: a copy that reads them,
// kernels of a closed lease, a cancelled copy that writes them. Each is a PageUse that stays with
// the pages, and whoever writes them next waits for it first. So what is under way delays a write
// and never changes who is evicted.
//
// Thread-safe.
#pragma once

#include <memory>
#include <vector>

namespace pagedlora {

class PageUse {
 public:
  virtual ~PageUse() = default;

  // Whether it has ended. Once true it stays so. Does not block.
  virtual bool is_over() const = 0;
};

using PageUses = std::vector<std::shared_ptr<const PageUse>>;

}  // namespace pagedlora
