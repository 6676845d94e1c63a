// The ownership table of task_owners.h (design 3.4, O1), call by call.
#include "pagedlora/task_owners.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
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

constexpr RequestId kA{1};
constexpr RequestId kB{2};

std::optional<TaskId> task_of(const std::optional<TaskOwners::Released>& released) {
  return released ? std::optional(released->task->id()) : std::nullopt;
}

std::size_t num_owned_tasks(const TaskOwners& owners) {
  std::size_t num_tasks = 0;
  owners.visit([&](const OwnedTask& /*task*/) { ++num_tasks; });
  return num_tasks;
}

class TaskOwnersTest : public ::testing::Test {
 protected:
  void TearDown() override { owners_.check_invariants(); }

  OwnedTask task_{TaskId{7}};
  OwnedTask other_{TaskId{8}};
  TaskOwners owners_;
};

TEST_F(TaskOwnersTest, O1_AddOfANewRequestMakesItActive) {
  EXPECT_EQ(owners_.add(kA, task_), Added::newly);
  EXPECT_EQ(task_.active(), Requests{kA});
  EXPECT_EQ(task_.paused(), Requests{});
  EXPECT_EQ(owners_.task_of(kA), task_.id());
  EXPECT_EQ(task_.num_active(), 1U);
  EXPECT_TRUE(task_.is_owned());
}

TEST_F(TaskOwnersTest, O1_AddOfAnActiveRequestChangesNothing) {
  owners_.add(kA, task_);
  EXPECT_EQ(owners_.add(kA, task_), Added::already);
  EXPECT_EQ(task_.active(), Requests{kA});
}

TEST_F(TaskOwnersTest, O1_AddOfAPausedRequestResumesIt) {
  owners_.add(kA, task_);
  owners_.pause(kA);
  EXPECT_EQ(owners_.add(kA, task_), Added::resumed);
  EXPECT_EQ(task_.active(), Requests{kA});
  EXPECT_EQ(task_.paused(), Requests{});
}

TEST_F(TaskOwnersTest, O1_PauseMovesAnActiveRequestAndNothingElse) {
  owners_.add(kA, task_);
  owners_.add(kB, task_);
  EXPECT_EQ(owners_.pause(kA)->task, &task_);
  EXPECT_EQ(task_.active(), Requests{kB});
  EXPECT_EQ(task_.paused(), Requests{kA});
  EXPECT_FALSE(owners_.pause(kA));  // already paused
  EXPECT_EQ(task_.paused(), Requests{kA});
  EXPECT_EQ(owners_.task_of(kA), task_.id());
}

TEST_F(TaskOwnersTest, O1_DoneRemovesAnActiveAndAPausedRequest) {
  owners_.add(kA, task_);
  owners_.add(kB, task_);
  owners_.pause(kB);
  EXPECT_EQ(owners_.done(kA)->task, &task_);
  EXPECT_EQ(task_.num_active(), 0U);
  EXPECT_TRUE(task_.is_owned());
  EXPECT_EQ(owners_.done(kB)->task, &task_);
  EXPECT_FALSE(task_.is_owned());
  EXPECT_EQ(owners_.task_of(kB), std::nullopt);
}

TEST_F(TaskOwnersTest, O1_UnknownRequestsLeaveNoPhantomEntries) {
  EXPECT_FALSE(owners_.pause(kA));
  EXPECT_FALSE(owners_.done(kA));
  EXPECT_EQ(num_owned_tasks(owners_), 0U);
  owners_.add(kA, task_);
  owners_.done(kA);
  EXPECT_FALSE(owners_.done(kA));
  EXPECT_FALSE(owners_.pause(kA));
  EXPECT_EQ(num_owned_tasks(owners_), 0U);
}

TEST_F(TaskOwnersTest, O1_ALiveRequestCannotChangeItsTask) {
  owners_.add(kA, task_);
  EXPECT_THROW(owners_.add(kA, other_), RequestConflictError);
  EXPECT_THROW(owners_.check_add(kA, other_.id()), RequestConflictError);
  owners_.pause(kA);
  EXPECT_THROW(owners_.add(kA, other_), RequestConflictError);
  EXPECT_FALSE(other_.is_owned());
  EXPECT_EQ(task_.paused(), Requests{kA});
  EXPECT_NO_THROW(owners_.check_add(kA, task_.id()));
}

TEST_F(TaskOwnersTest, AnIdIsFreeForAnotherTaskOnceItsRequestIsDone) {
  owners_.add(kA, task_);
  owners_.done(kA);
  EXPECT_EQ(owners_.add(kA, other_), Added::newly);
  EXPECT_EQ(owners_.task_of(kA), other_.id());
}

TEST_F(TaskOwnersTest, AgreesWithAMapThroughRandomCalls) {
  struct Life {
    TaskId task;
    bool is_paused;
  };
  for (const std::uint32_t seed : seeds(5)) {
    SCOPED_TRACE(seed_label(seed));
    std::mt19937 rng(seed);
    std::array<OwnedTask, 3> tasks{OwnedTask(TaskId{0}), OwnedTask(TaskId{1}),
                                   OwnedTask(TaskId{2})};
    TaskOwners owners;
    std::map<RequestId, Life> model;
    for (int step = 0; step < num_steps(5000); ++step) {
      const RequestId request{rng() % 6};
      OwnedTask& task = tasks[rng() % 3];
      const auto life = model.find(request);
      const bool alive = life != model.end();
      const auto changed = [&](bool does) {
        return does ? std::optional(life->second.task) : std::nullopt;
      };
      switch (rng() % 3) {
        case 0:
          if (alive && life->second.task != task.id()) {
            ASSERT_THROW(owners.add(request, task), RequestConflictError);
          } else {
            const Added expected = !alive                   ? Added::newly
                                   : life->second.is_paused ? Added::resumed
                                                            : Added::already;
            ASSERT_EQ(owners.add(request, task), expected);
            model[request] = {task.id(), false};
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
      std::size_t num_owned = 0;
      for (const OwnedTask& each : tasks) {
        Requests active;
        Requests paused;
        for (const auto& [id, owner] : model) {
          if (owner.task == each.id()) {
            (owner.is_paused ? paused : active).insert(id);
          }
        }
        ASSERT_EQ(each.active(), active);
        ASSERT_EQ(each.paused(), paused);
        ASSERT_EQ(each.num_owners(), active.size() + paused.size());
        num_owned += each.is_owned() ? 1U : 0U;
      }
      ASSERT_EQ(num_owned_tasks(owners), num_owned);
    }
  }
}

TEST_F(TaskOwnersTest, MoreOwnersThanAreKeptRoomForComeAndGoInAnyOrder) {
  constexpr std::uint64_t kMany = 200;
  for (int round = 0; round < 2; ++round) {
    for (std::uint64_t i = 0; i < kMany; ++i) {
      ASSERT_EQ(owners_.add(RequestId{i}, i % 3 == 0 ? other_ : task_, true), Added::newly);
      ASSERT_TRUE(owners_.has_started(RequestId{i}));
    }
    ASSERT_NO_THROW(owners_.check_invariants());
    EXPECT_EQ(task_.num_owners() + other_.num_owners(), kMany);
    for (std::uint64_t i = 0; i < kMany; ++i) {
      ASSERT_TRUE(owners_.done(RequestId{(i * 7) % kMany}));
    }
    EXPECT_EQ(num_owned_tasks(owners_), 0U);
  }
  owners_.add(kA, task_);
  EXPECT_FALSE(owners_.has_started(kA)) << "what an ended request was is forgotten";
}

TEST_F(TaskOwnersTest, OwnedSinceNumbersTheFirstOwners) {
  owners_.add(kA, task_);
  owners_.add(kB, other_);
  EXPECT_LT(task_.owned_since(), other_.owned_since());
  owners_.add(RequestId{3}, task_);
  EXPECT_LT(task_.owned_since(), other_.owned_since()) << "the task had an owner";
  owners_.revoke(task_);
  owners_.add(kA, task_);
  EXPECT_GT(task_.owned_since(), other_.owned_since());
}

TEST_F(TaskOwnersTest, O4_ARequestHasStartedOnceItIsStartedOrPaused) {
  owners_.add(kA, task_);
  EXPECT_TRUE(task_.is_revocable());
  EXPECT_TRUE(owners_.start(kA));
  EXPECT_FALSE(owners_.start(kA)) << "it has already";
  EXPECT_FALSE(owners_.start(kB)) << "it owns nothing";
  EXPECT_EQ(task_.num_started(), 1U);
  EXPECT_FALSE(task_.is_revocable());
  owners_.done(kA);
  owners_.add(kB, task_);
  owners_.pause(kB);
  EXPECT_FALSE(task_.is_revocable());
  EXPECT_FALSE(owners_.start(kB)) << "it is paused";
  owners_.add(kB, task_);
  EXPECT_EQ(task_.num_started(), 1U);
}

TEST_F(TaskOwnersTest, PauseAndDoneSayWhatTheTaskLost) {
  owners_.add(kA, task_);
  owners_.add(kB, task_);
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
  owners_.add(kA, task_);
  owners_.add(kB, task_);
  owners_.revoke(task_);
  EXPECT_FALSE(task_.is_owned());
  EXPECT_EQ(owners_.task_of(kA), std::nullopt);
  EXPECT_FALSE(owners_.is_active(kA) || owners_.start(kA) || owners_.pause(kA));
  EXPECT_TRUE(owners_.was_revoked(kA) && owners_.was_revoked(kB));
  owners_.check_invariants();
  EXPECT_FALSE(owners_.done(kB)) << "no task lost an owner by it";
  EXPECT_FALSE(owners_.was_revoked(kB)) << "it has ended";
  EXPECT_EQ(owners_.add(kA, other_), Added::newly);
  EXPECT_FALSE(owners_.was_revoked(kA));
  owners_.start(kA);
  EXPECT_THROW(owners_.revoke(other_), std::logic_error);
  EXPECT_THROW(owners_.revoke(task_), std::logic_error);
}

TEST_F(TaskOwnersTest, C1_AFailureIsALevelUntilTheRequestIsDone) {
  owners_.add(kA, task_);
  owners_.add(kB, task_);
  owners_.pause(kB);
  owners_.fail(task_, std::make_exception_ptr(std::runtime_error("broken")));
  EXPECT_FALSE(task_.is_owned());
  for (const RequestId request : {kA, kB}) {
    ASSERT_NE(owners_.failure_of(request), nullptr);
    EXPECT_EQ(owners_.add(request, task_), Added::already);
    EXPECT_FALSE(owners_.pause(request));
    EXPECT_THROW(owners_.add(request, other_), RequestConflictError);
    EXPECT_EQ(owners_.task_of(request), task_.id());
    EXPECT_FALSE(owners_.done(request)) << "it owned nothing";
    EXPECT_EQ(owners_.failure_of(request), nullptr);
  }
  EXPECT_EQ(owners_.add(kA, task_), Added::newly);
}

}  // namespace
}  // namespace pagedlora
