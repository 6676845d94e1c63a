#include "pagedlora/task_shortcuts.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace pagedlora {
namespace {

class Record {
 public:
  explicit Record(std::uint64_t id) : id_{id} {}
  TaskId id() const { return id_; }

 private:
  TaskId id_;
};

TEST(TaskShortcutsTest, FindsWhatItRemembersUntilThatIsForgotten) {
  TaskShortcuts<Record> shortcuts;
  Record one(1);
  Record two(2);
  EXPECT_EQ(shortcuts.find(one.id()), nullptr);
  shortcuts.reserve(2);
  shortcuts.remember(one, nullptr);
  shortcuts.remember(two, &one);
  EXPECT_EQ(shortcuts.find(one.id()), &one);
  EXPECT_EQ(shortcuts.find(two.id()), &two);
  EXPECT_EQ(shortcuts.size(), 2U);
  shortcuts.forget(one);
  EXPECT_EQ(shortcuts.find(one.id()), nullptr);
  EXPECT_EQ(shortcuts.find(two.id()), &two);
  EXPECT_EQ(shortcuts.size(), 1U);
}

TEST(TaskShortcutsTest, TasksThatShareAPlaceDriveEachOtherOut) {
  TaskShortcuts<Record> shortcuts;
  shortcuts.reserve(4);
  Record one(1);
  Record far(1 + (std::uint64_t{1} << 32));
  shortcuts.remember(one, nullptr);
  EXPECT_EQ(shortcuts.find(far.id()), nullptr);
  shortcuts.remember(far, nullptr);
  EXPECT_EQ(shortcuts.find(far.id()), &far);
  EXPECT_EQ(shortcuts.find(one.id()), nullptr);
  shortcuts.forget(one);
  EXPECT_EQ(shortcuts.find(far.id()), &far) << "another one has the place";
}

TEST(TaskShortcutsTest, GrowingForgetsAndNothingElseDoes) {
  TaskShortcuts<Record> shortcuts;
  shortcuts.reserve(3);
  Record one(1);
  shortcuts.remember(one, nullptr);
  shortcuts.reserve(4);
  EXPECT_EQ(shortcuts.find(one.id()), &one) << "there was room for four";
  shortcuts.reserve(5);
  EXPECT_EQ(shortcuts.find(one.id()), nullptr);
  EXPECT_EQ(shortcuts.size(), 0U);
}

}  // namespace
}  // namespace pagedlora
