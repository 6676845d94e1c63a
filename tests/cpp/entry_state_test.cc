// Every (state, event) pair of the one table (design 3.3).
#include "pagedlora/entry_state.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>

namespace pagedlora {
namespace {

constexpr std::array kStates{EntryState::absent, EntryState::loading, EntryState::resident};
constexpr std::array kEvents{EntryEvent::claim, EntryEvent::publish, EntryEvent::fail,
                             EntryEvent::cancel, EntryEvent::evict};

TEST(EntryStateTest, EveryPairOfStateAndEventIsInTheTableOrRefused) {
  // absent --claim--> loading --publish--> resident --evict--> absent; loading --fail--> absent;
  // loading --cancel--> absent
  const std::map<std::pair<EntryState, EntryEvent>, EntryState> allowed{
      {{EntryState::absent, EntryEvent::claim}, EntryState::loading},
      {{EntryState::loading, EntryEvent::publish}, EntryState::resident},
      {{EntryState::loading, EntryEvent::fail}, EntryState::absent},
      {{EntryState::loading, EntryEvent::cancel}, EntryState::absent},
      {{EntryState::resident, EntryEvent::evict}, EntryState::absent},
  };
  for (const EntryState state : kStates) {
    for (const EntryEvent event : kEvents) {
      const auto found = allowed.find({state, event});
      const auto expected = found == allowed.end() ? std::nullopt : std::optional(found->second);
      EXPECT_EQ(next_state(state, event), expected)
          << entry_state_name(state) << " + " << entry_event_name(event);
    }
  }
  EXPECT_EQ(kEntryTransitions.size(), allowed.size());
}

TEST(EntryStateTest, EveryStateIsReachedAndLeft) {
  std::set<EntryState> reached;
  std::set<EntryState> left;
  for (const EntryTransition& transition : kEntryTransitions) {
    reached.insert(transition.to);
    left.insert(transition.from);
  }
  EXPECT_EQ(reached, std::set<EntryState>(kStates.begin(), kStates.end()));
  EXPECT_EQ(left, reached);
}

TEST(EntryStateTest, NamesAreThoseOfTheDocumentation) {
  EXPECT_EQ(entry_state_name(EntryState::absent), "absent");
  EXPECT_EQ(entry_state_name(EntryState::loading), "loading");
  EXPECT_EQ(entry_state_name(EntryState::resident), "resident");
  EXPECT_EQ(entry_event_name(EntryEvent::claim), "claim");
  EXPECT_EQ(entry_event_name(EntryEvent::publish), "publish");
  EXPECT_EQ(entry_event_name(EntryEvent::fail), "fail");
  EXPECT_EQ(entry_event_name(EntryEvent::cancel), "cancel");
  EXPECT_EQ(entry_event_name(EntryEvent::evict), "evict");
}

}  // namespace
}  // namespace pagedlora
