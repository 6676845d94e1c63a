// The ownership table of task_owners.h (design 3.4, O1), call by call.
#include "pagedlora/task_owners.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>

#include "pagedlora/errors.h"
#include "random_seeds.h"

namespace pagedlora {
namespace {

using testing_support::num_steps;
using testing_support::seed_label;
using testing_support::seeds;
using Added = TaskOwners::Added;
using Requests = std::set<RequestId>;

constexpr TaskId kTask{7};
constexpr TaskId kOther{8};
constexpr RequestId kA{1};
constexpr RequestId kB{2};

std::optional<TaskId> task_of(const std::optional<TaskOwners::Released>& released) {
  return released ? std::optional(released->task) : std::nullopt;
}

class TaskOwnersTest : public ::testing::Test {
 protected:
  void TearDown() override { owners_.check_invariants(); }

  Requests active(TaskId task) const {
    const TaskOwners::Sets* sets = owners_.sets_of(task);
    return sets == nullptr ? Requests{} : sets->active;
  }
  Requests paused(TaskId task) const {
    const TaskOwners::Sets* sets = owners_.sets_of(task);
    return sets == nullptr ? Requests{} : sets->paused;
  }

  TaskOwners owners_;
};

TEST_F(TaskOwnersTest, O1_AddOfANewRequestMakesItActive) {
  EXPECT_EQ(owners_.add(kA, kTask), Added::newly);
  EXPECT_EQ(active(kTask), Requests{kA});
  EXPECT_EQ(paused(kTask), Requests{});
  EXPECT_EQ(owners_.task_of(kA), kTask);
  EXPECT_TRUE(owners_.has_active(kTask));
  EXPECT_TRUE(owners_.has_any(kTask));
}

TEST_F(TaskOwnersTest, O1_AddOfAnActiveRequestChangesNothing) {
  owners_.add(kA, kTask);
  EXPECT_EQ(owners_.add(kA, kTask), Added::already);
  EXPECT_EQ(active(kTask), Requests{kA});
}

TEST_F(TaskOwnersTest, O1_AddOfAPausedRequestResumesIt) {
  owners_.add(kA, kTask);
  owners_.pause(kA);
  EXPECT_EQ(owners_.add(kA, kTask), Added::resumed);
  EXPECT_EQ(active(kTask), Requests{kA});
  EXPECT_EQ(paused(kTask), Requests{});
}

TEST_F(TaskOwnersTest, O1_PauseMovesAnActiveRequestAndNothingElse) {
  owners_.add(kA, kTask);
  owners_.add(kB, kTask);
  EXPECT_EQ(owners_.pause(kA)->task, kTask);
  EXPECT_EQ(active(kTask), Requests{kB});
  EXPECT_EQ(paused(kTask), Requests{kA});
  EXPECT_FALSE(owners_.pause(kA));  // already paused
  EXPECT_EQ(paused(kTask), Requests{kA});
  EXPECT_EQ(owners_.task_of(kA), kTask);
}

TEST_F(TaskOwnersTest, O1_DoneRemovesAnActiveAndAPausedRequest) {
  owners_.add(kA, kTask);
  owners_.add(kB, kTask);
  owners_.pause(kB);
  EXPECT_EQ(owners_.done(kA)->task, kTask);
  EXPECT_FALSE(owners_.has_active(kTask));
  EXPECT_TRUE(owners_.has_any(kTask));
  EXPECT_EQ(owners_.done(kB)->task, kTask);
  EXPECT_FALSE(owners_.has_any(kTask));
  EXPECT_EQ(owners_.task_of(kB), std::nullopt);
}

TEST_F(TaskOwnersTest, O1_UnknownRequestsLeaveNoPhantomEntries) {
  EXPECT_FALSE(owners_.pause(kA));
  EXPECT_FALSE(owners_.done(kA));
  EXPECT_TRUE(owners_.by_task().empty());
  owners_.add(kA, kTask);
  owners_.done(kA);
  EXPECT_FALSE(owners_.done(kA));
  EXPECT_FALSE(owners_.pause(kA));
  EXPECT_TRUE(owners_.by_task().empty());
}

TEST_F(TaskOwnersTest, O1_ALiveRequestCannotChangeItsTask) {
  owners_.add(kA, kTask);
  EXPECT_THROW(owners_.add(kA, kOther), RequestConflictError);
  EXPECT_THROW(owners_.check_add(kA, kOther), RequestConflictError);
  owners_.pause(kA);
  EXPECT_THROW(owners_.add(kA, kOther), RequestConflictError);
  EXPECT_EQ(owners_.sets_of(kOther), nullptr);
  EXPECT_EQ(paused(kTask), Requests{kA});
  EXPECT_NO_THROW(owners_.check_add(kA, kTask));
}

TEST_F(TaskOwnersTest, AnIdIsFreeForAnotherTaskOnceItsRequestIsDone) {
  owners_.add(kA, kTask);
  owners_.done(kA);
  EXPECT_EQ(owners_.add(kA, kOther), Added::newly);
  EXPECT_EQ(owners_.task_of(kA), kOther);
}

TEST_F(TaskOwnersTest, AgreesWithAMapThroughRandomCalls) {
  struct Life {
    TaskId task;
    bool is_paused;
  };
  for (const std::uint32_t seed : seeds(5)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    TaskOwners owners;
    std::map<RequestId, Life> model;
    for (int step = 0; step < num_steps(5000); ++step) {
      const RequestId request{rng() % 6};
      const TaskId task{rng() % 3};
      const auto life = model.find(request);
      const bool alive = life != model.end();
      const auto changed = [&](bool does) {
        return does ? std::optional(life->second.task) : std::nullopt;
      };
      switch (rng() % 3) {
        case 0:
          if (alive && life->second.task != task) {
            ASSERT_THROW(owners.add(request, task), RequestConflictError);
          } else {
            const Added expected = !alive                   ? Added::newly
                                   : life->second.is_paused ? Added::resumed
                                                            : Added::already;
            ASSERT_EQ(owners.add(request, task), expected);
            model[request] = {task, false};
          }
          break;
        case 1: {
          const bool moves = alive && !life->second.is_paused;
          ASSERT_EQ(task_of(owners.pause(request)), changed(moves));
          if (moves) {
            life->second.is_paused = true;
          }
          break;
        }
        default:
          ASSERT_EQ(task_of(owners.done(request)), changed(alive));
          model.erase(request);
      }
      ASSERT_NO_THROW(owners.check_invariants());
      std::map<TaskId, TaskOwners::Sets> expected;
      for (const auto& [id, each] : model) {
        (each.is_paused ? expected[each.task].paused : expected[each.task].active).insert(id);
      }
      ASSERT_EQ(owners.by_task().size(), expected.size());
      for (const auto& [id, sets] : expected) {
        ASSERT_EQ(owners.sets_of(id)->active, sets.active);
        ASSERT_EQ(owners.sets_of(id)->paused, sets.paused);
      }
    }
  }
}

TEST_F(TaskOwnersTest, O4_ARequestHasStartedOnceItIsStartedOrPaused) {
  owners_.add(kA, kTask);
  EXPECT_TRUE(owners_.sets_of(kTask)->is_revocable());
  EXPECT_TRUE(owners_.start(kA));
  EXPECT_FALSE(owners_.start(kA)) << "it has already";
  EXPECT_FALSE(owners_.start(kB)) << "it owns nothing";
  EXPECT_EQ(owners_.sets_of(kTask)->num_started, 1U);
  EXPECT_FALSE(owners_.sets_of(kTask)->is_revocable());
  owners_.done(kA);
  owners_.add(kB, kTask);
  owners_.pause(kB);
  EXPECT_FALSE(owners_.sets_of(kTask)->is_revocable());
  EXPECT_FALSE(owners_.start(kB)) << "it is paused";
  owners_.add(kB, kTask);
  EXPECT_EQ(owners_.sets_of(kTask)->num_started, 1U);
}

TEST_F(TaskOwnersTest, PauseAndDoneSayWhatTheTaskLost) {
  bool is_first = false;
  owners_.add(kA, kTask, false, &is_first);
  EXPECT_TRUE(is_first);
  owners_.add(kB, kTask, false, &is_first);
  EXPECT_FALSE(is_first);
  auto released = owners_.pause(kA);
  EXPECT_FALSE(released->last_active || released->last);
  released = owners_.done(kB);
  EXPECT_TRUE(released->last_active);
  EXPECT_FALSE(released->last);
  released = owners_.done(kA);
  EXPECT_FALSE(released->last_active) << "it was paused";
  EXPECT_TRUE(released->last);
}

TEST_F(TaskOwnersTest, O4_RevokedOwnersOwnNothingAndCanBeAddedAgain) {
  owners_.add(kA, kTask);
  owners_.add(kB, kTask);
  owners_.revoke(kTask);
  EXPECT_EQ(owners_.sets_of(kTask), nullptr);
  EXPECT_EQ(owners_.task_of(kA), std::nullopt);
  EXPECT_EQ(owners_.add(kA, kOther), Added::newly);
  owners_.start(kA);
  EXPECT_THROW(owners_.revoke(kOther), std::logic_error);
  EXPECT_THROW(owners_.revoke(kTask), std::logic_error);
}

TEST_F(TaskOwnersTest, C1_AFailureIsALevelUntilTheRequestIsDone) {
  owners_.add(kA, kTask);
  owners_.add(kB, kTask);
  owners_.pause(kB);
  owners_.fail(kTask, std::make_exception_ptr(std::runtime_error("broken")));
  EXPECT_EQ(owners_.sets_of(kTask), nullptr);
  for (const RequestId request : {kA, kB}) {
    ASSERT_NE(owners_.failure_of(request), nullptr);
    EXPECT_EQ(owners_.add(request, kTask), Added::already);
    EXPECT_FALSE(owners_.pause(request));
    EXPECT_THROW(owners_.add(request, kOther), RequestConflictError);
    EXPECT_EQ(owners_.task_of(request), kTask);
    EXPECT_FALSE(owners_.done(request)) << "it owned nothing";
    EXPECT_EQ(owners_.failure_of(request), nullptr);
  }
  EXPECT_EQ(owners_.add(kA, kTask), Added::newly);
}

}  // namespace
}  // namespace pagedlora
