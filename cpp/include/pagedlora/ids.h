// Strong types for the numbers that name things, so that a page cannot be passed for a task.
//
// Immutable values; thread-compatible.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace pagedlora {

template <class Tag, class Rep>
struct StrongId {
  Rep value{};

  friend constexpr auto operator<=>(const StrongId&, const StrongId&) = default;
};

// One immutable loaded version of an adapter, as the caches know it. Never derived from a name.
using TaskId = StrongId<struct TaskTag, std::uint64_t>;

// One generation request.
using RequestId = StrongId<struct RequestTag, std::uint64_t>;

// Position of a page in its pool: its address is base + value * page_bytes.
using PageId = StrongId<struct PageTag, std::uint32_t>;

// Position of a module in LoraModelConfig::modules.
using ModuleIndex = StrongId<struct ModuleTag, std::uint32_t>;

}  // namespace pagedlora

template <class Tag, class Rep>
struct std::hash<pagedlora::StrongId<Tag, Rep>> {
  std::size_t operator()(const pagedlora::StrongId<Tag, Rep>& id) const noexcept {
    return std::hash<Rep>{}(id.value);
  }
};
