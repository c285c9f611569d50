#include "csrc/comm/watched_communicator.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "csrc/comm/group_wait.h"
#include "tests/cpp/comm/local_world.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Kind = health::Fault::Kind;
using health::BlockedScope;

constexpr milliseconds kLonger{1500};  // than a deadlock needs

// Communicators of some ranks, as the library makes them.
std::vector<CommunicatorPtr> watched(health::World& world,
                                     const std::vector<int>& ranks) {
  std::vector<CommunicatorPtr> made;
  const auto inner = make_local_world(static_cast<int>(ranks.size()));
  for (size_t i = 0; i < ranks.size(); ++i) {
    made.push_back(
        make_watched_communicator(inner[i], world.boards[ranks[i]], ranks));
  }
  return made;
}

at::Tensor some_bytes(int64_t count) {
  return at::zeros({count}, at::TensorOptions(at::kByte));
}

TEST(WatchedCollective, ThatAllHaveEnteredIsNoDeadlockHoweverLongItTakes) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  std::vector<WorkPtr> works;
  for (const auto& one : group)
    works.push_back(one->broadcast(some_bytes(8), 0));
  // Rank 0 has sent its part, and waits for the next one.
  const WorkPtr next = group[0]->broadcast(some_bytes(8), 0);
  BlockedScope first(world.boards[0]->waits(), "b", next->collective());
  BlockedScope second(world.boards[1]->waits(), "b", works[1]->collective());
  std::this_thread::sleep_for(kLonger);
  EXPECT_FALSE(world.boards[0]->fault());
  world.leave_all();
}

TEST(WatchedCollective, ThatSomebodyDoesNotEnterIsADeadlock) {
  health::World world(3);
  const auto group = watched(world, {0, 1, 2});
  std::vector<WorkPtr> works;
  for (const int rank : {0, 1}) works.push_back(group[rank]->barrier());
  BlockedScope first(world.boards[0]->waits(), "b", works[0]->collective());
  BlockedScope second(world.boards[1]->waits(), "b", works[1]->collective());
  BlockedScope third(world.boards[2]->waits(), "a message");
  ASSERT_TRUE(world.fault_at(0));
  EXPECT_EQ(world.boards[0]->fault()->kind, Kind::kDeadlock);
}

TEST(WatchedCollective, CircleOfCollectivesIsADeadlock) {
  health::World world(2);
  const auto one = watched(world, {0, 1});
  const auto other = watched(world, {1, 0});
  const WorkPtr mine = one[0]->barrier();
  const WorkPtr yours = other[0]->barrier();
  BlockedScope first(world.boards[0]->waits(), "one", mine->collective());
  BlockedScope second(world.boards[1]->waits(), "other", yours->collective());
  ASSERT_TRUE(world.fault_at(1));
  EXPECT_EQ(world.boards[1]->fault()->kind, Kind::kDeadlock);
}

TEST(WatchedCollective, DifferentCallsOfOneNumberAreADeadlock) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  const WorkPtr mine = group[0]->all_reduce(some_bytes(8), ReduceOp::kSum);
  const WorkPtr yours = group[1]->barrier();
  // The deadlock is found although rank 1 goes on.
  const WorkPtr next = group[1]->all_reduce(some_bytes(8), ReduceOp::kSum);
  BlockedScope first(world.boards[0]->waits(), "sum", mine->collective());
  BlockedScope second(world.boards[1]->waits(), "next", next->collective());
  ASSERT_TRUE(world.fault_at(0));
  EXPECT_EQ(world.boards[0]->fault()->kind, Kind::kDeadlock);
}

TEST(WatchedCollective, WhoHasLeftHadDoneItsPartOfWhatItEntered) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  const WorkPtr mine = group[0]->barrier();
  const WorkPtr yours = group[1]->barrier();
  const WorkPtr next = group[0]->barrier();
  world.clients[1]->leave();
  EXPECT_TRUE(becomes_true([&] { return world.boards[0]->has_left(1); }));
  health::Goodbyes& goodbyes = world.boards[0]->goodbyes();
  EXPECT_TRUE(becomes_true([&] {  // the hub is asked
    return goodbyes.rank_left_before(*next->collective()) == 1;
  }));
  EXPECT_FALSE(goodbyes.rank_left_before(*mine->collective()));
  world.leave_all();
}

TEST(WatchedCollective, AWaitFromOutsideEndsWithTheFaultOfAnotherRank) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  const WorkPtr sum = group[0]->all_reduce(some_bytes(8), ReduceOp::kSum);
  const WorkPtr message = group[0]->recv(some_bytes(8), 1, 3);
  world.clients[1]->report_raised("a layer", "on purpose");
  for (const WorkPtr& work : {sum, message}) {
    const std::string error = error_of([&] { wait_within(*work, kPatience); });
    EXPECT_NE(error.find("global_rank 1 raised in a layer: on purpose"),
              std::string::npos)
        << error;
  }
}

TEST(WatchedCollective, AWaitFromOutsideEndsWhenARankLeftBefore) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  const WorkPtr sum = group[0]->all_reduce(some_bytes(8), ReduceOp::kSum);
  world.clients[1]->leave();
  const std::string error = error_of([&] { wait_within(*sum, kPatience); });
  EXPECT_NE(error.find("global_rank 1 has left"), std::string::npos) << error;
  EXPECT_NE(error.find("all_reduce over "), std::string::npos) << error;
}

TEST(WatchedCollective, AWaitFromOutsideKeepsItsTime) {
  health::World world(2);
  const auto group = watched(world, {0, 1});
  const WorkPtr sum = group[0]->all_reduce(some_bytes(1 << 24), ReduceOp::kSum);
  // Whatever its size, by which waits of the library grow.
  EXPECT_NE(error_of([&] {
              wait_within(*sum, milliseconds(250));
            }).find("timed out after 250 ms"),
            std::string::npos);
  EXPECT_EQ(world.boards[0]->waits().snapshot().is_blocked, false);
  world.leave_all();
}

}  // namespace
}  // namespace smp::comm
