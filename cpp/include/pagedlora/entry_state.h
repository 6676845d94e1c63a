// The life of one task in one tier. docs/states.md explains it; a test compares the two.
//
//     absent --claim--> loading --publish--> resident --evict--> absent
//                          |\----- fail -----------------------> absent
//                           \----- cancel ---------------------> absent
//
//   absent    no pages; the tier does not know the task
//   loading   pages are claimed and being written, nobody may read them; the load can be cancelled
//             while the pin count is zero
//   resident  every part is in place and readable; evictable while the pin count is zero
//
// What is not in the table is refused: a second claim would let two writers meet, an eviction of
// a loading entry would not stop its writer. Pins are a counter beside the state, never a state.
//
// Immutable; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pagedlora {

enum class EntryState : std::uint8_t { absent, loading, resident };
enum class EntryEvent : std::uint8_t { claim, publish, fail, cancel, evict };

struct EntryTransition {
  EntryState from;
  EntryEvent event;
  EntryState to;
};

inline constexpr std::array kEntryTransitions{
    EntryTransition{EntryState::absent, EntryEvent::claim, EntryState::loading},
    EntryTransition{EntryState::loading, EntryEvent::publish, EntryState::resident},
    EntryTransition{EntryState::loading, EntryEvent::fail, EntryState::absent},
    EntryTransition{EntryState::loading, EntryEvent::cancel, EntryState::absent},
    EntryTransition{EntryState::resident, EntryEvent::evict, EntryState::absent},
};

constexpr std::optional<EntryState> next_state(EntryState from, EntryEvent event) {
  for (const EntryTransition& transition : kEntryTransitions) {
    if (transition.from == from && transition.event == event) {
      return transition.to;
    }
  }
  return std::nullopt;
}

constexpr std::string_view entry_state_name(EntryState state) {
  constexpr std::array<std::string_view, 3> kNames{"absent", "loading", "resident"};
  return kNames[static_cast<std::size_t>(state)];
}

constexpr std::string_view entry_event_name(EntryEvent event) {
  constexpr std::array<std::string_view, 5> kNames{"claim", "publish", "fail", "cancel", "evict"};
  return kNames[static_cast<std::size_t>(event)];
}

}  // namespace pagedlora
