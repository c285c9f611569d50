#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/deadlock_search.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/goodbye_news.h"
#include "csrc/health/goodbyes.h"
#include "csrc/health/membership.h"
#include "csrc/health/rank_set.h"
#include "csrc/health/stop_round.h"

// The parts of the hub that decide, without connections; and what the ranks
// know of goodbyes.

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Type = LivenessFrame::Type;
const auto kStart = std::chrono::steady_clock::time_point(seconds(1000));

RankSet set_of_ranks(const std::vector<int>& ranks) {
  RankSet set;
  for (const int rank : ranks) set.add(rank);
  return set;
}

Membership complete(int size) {
  Membership members(size);
  for (int rank = 0; rank < size; ++rank) members.on_come(rank);
  return members;
}

// ------------------------------------------------------------------- RankSet

TEST(RankSet, ComesBackFromItsBytes) {
  const std::vector<int> ranks = {0, 7, 8, 300};
  const RankSet set = set_of_ranks({300, 8, 0, 7, 8});
  EXPECT_EQ(set.ranks(), ranks);
  EXPECT_EQ(RankSet::decode(set.encode()).ranks(), ranks);
  EXPECT_EQ(set.encode().size(), 38u);
  EXPECT_TRUE(RankSet().is_empty());
  EXPECT_FALSE(set.is_empty());
}

TEST(RankSet, AnyBytesAreASet) {
  EXPECT_TRUE(RankSet::decode(std::string(9, '\0')).is_empty());
  EXPECT_EQ(RankSet::decode(std::string("\0\x80\0", 3)).ranks(),
            std::vector<int>{15});
  EXPECT_THROW(RankSet().add(-1), InternalError);
}

// ---------------------------------------------------------------- Membership

TEST(Membership, ARankIsGivenOnce) {
  Membership members(3);
  EXPECT_EQ(members.refusal(3), "ranks are 0 to 2");
  EXPECT_EQ(members.refusal(-1), "ranks are 0 to 2");
  EXPECT_EQ(members.refusal(2), "");
  members.on_come(2);
  EXPECT_EQ(members.refusal(2), "another process has this rank");
  EXPECT_TRUE(members.on_lost(2));
  EXPECT_EQ(members.refusal(2), "another process has this rank");
}

TEST(Membership, TellsWhoIsThereFromWhoIsGone) {
  Membership members = complete(3);
  EXPECT_TRUE(members.is_complete());
  members.on_left(1, {});
  EXPECT_THROW(members.on_left(1, {}), Error);
  EXPECT_FALSE(members.on_lost(1)) << "that is no death";
  EXPECT_TRUE(members.is_complete());
  EXPECT_FALSE(members.is_there(1));
  EXPECT_EQ(members.num_there(), 2);
  EXPECT_TRUE(members.on_lost(2));
  EXPECT_FALSE(members.on_lost(2)) << "it dies once";
  EXPECT_FALSE(members.is_complete());
  EXPECT_FALSE(members.all_are_gone());
  members.on_left(0, {});
  EXPECT_TRUE(members.all_are_gone());
  EXPECT_FALSE(members.all_have_left());
  EXPECT_EQ(members.left_ranks().ranks(), (std::vector<int>{0, 1}));
}

TEST(Membership, FindsWhoLeftBeforeACollective) {
  Membership members = complete(3);
  CollectiveLog log;
  CollectiveId first{.group = 4, .signature = 1, .ranks = {1, 2}};
  log.enter(first);
  members.on_left(1, {.where = "", .entered = log.state(std::nullopt)});
  EXPECT_FALSE(members.left_before(first));
  CollectiveId second = first;
  second.sequence = 2;
  EXPECT_EQ(members.left_before(second), 1);
  second.ranks = {2, 0};
  EXPECT_FALSE(members.left_before(second)) << "of others";
}

// --------------------------------------------------------------- GoodbyeNews

TEST(GoodbyeNews, TheFirstIsToldAtOnceAndOthersTogether) {
  GoodbyeNews news;
  EXPECT_FALSE(news.due_in(kStart));
  news.on_left(3);
  EXPECT_EQ(news.due(kStart, false)->ranks(), std::vector<int>{3});
  EXPECT_FALSE(news.due(kStart, true)) << "it has been told";
  news.on_left(5);
  EXPECT_FALSE(news.due(kStart + milliseconds(10), false));
  news.on_left(4);
  EXPECT_EQ(*news.due_in(kStart + milliseconds(50)),
            GoodbyeNews::kEvery - milliseconds(50));
  EXPECT_EQ(news.due(kStart + GoodbyeNews::kEvery, false)->ranks(),
            (std::vector<int>{4, 5}));
  EXPECT_LT(2 * GoodbyeNews::kEvery, FaultAwareWait::kLeftGrace);
}

TEST(GoodbyeNews, AtTheEndNothingWaits) {
  GoodbyeNews news;
  news.on_left(0);
  ASSERT_TRUE(news.due(kStart, false));
  news.on_left(1);
  EXPECT_EQ(news.due(kStart, true)->ranks(), std::vector<int>{1});
}

// ------------------------------------------------------------------ Goodbyes

CollectiveId some_call(int64_t sequence) {
  return {.group = 6, .sequence = sequence, .signature = 2, .ranks = {0, 1, 2}};
}

TEST(Goodbyes, WhatIsKnownIsNotAskedFor) {
  Goodbyes goodbyes;
  int num_asked = 0;
  goodbyes.set_send_query([&](const CollectiveId&) { ++num_asked; });
  EXPECT_FALSE(goodbyes.rank_left_before(some_call(1)));
  CollectiveLog log;
  CollectiveId entered = some_call(1);
  log.enter(entered);
  EXPECT_TRUE(goodbyes.add(1, log.state(std::nullopt)));
  EXPECT_FALSE(goodbyes.add(1, {})) << "it says goodbye once";
  EXPECT_TRUE(goodbyes.has(1));
  EXPECT_FALSE(goodbyes.has(2));
  EXPECT_FALSE(goodbyes.rank_left_before(some_call(1)));
  EXPECT_EQ(goodbyes.rank_left_before(some_call(2)), 1);
  EXPECT_EQ(num_asked, 0);
}

TEST(Goodbyes, WhatIsNotKnownIsAskedForOnceAfterEachNews) {
  Goodbyes goodbyes;
  std::vector<CollectiveId> asked;
  goodbyes.set_send_query(
      [&](const CollectiveId& one) { asked.push_back(one); });
  EXPECT_TRUE(goodbyes.add(set_of_ranks({2, 9})));
  EXPECT_FALSE(goodbyes.add(set_of_ranks({9})));
  CollectiveId call = some_call(3);
  call.goes_on_alone = false;
  EXPECT_FALSE(goodbyes.rank_left_before(call));
  EXPECT_FALSE(goodbyes.rank_left_before(call));
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].sequence, 3);
  EXPECT_TRUE(asked[0].goes_on_alone) << "it waited before it left";
  EXPECT_TRUE(goodbyes.add(set_of_ranks({0})));
  EXPECT_FALSE(goodbyes.rank_left_before(call));
  EXPECT_EQ(asked.size(), 2u);
  goodbyes.on_answer(call, 0);
  EXPECT_EQ(goodbyes.rank_left_before(call), 0);
  EXPECT_FALSE(goodbyes.rank_left_before(some_call(2))) << "of another one";
  EXPECT_EQ(asked.size(), 3u);
  goodbyes.set_send_query(nullptr);
  EXPECT_FALSE(goodbyes.rank_left_before(some_call(1)));
}

TEST(Goodbyes, ACollectiveOfOthersIsNotAskedFor) {
  Goodbyes goodbyes;
  goodbyes.set_send_query(
      [](const CollectiveId&) { ADD_FAILURE() << "asked"; });
  goodbyes.add(set_of_ranks({7}));
  EXPECT_FALSE(goodbyes.rank_left_before(some_call(1)));
}

// ----------------------------------------------------------------- StopRound

TEST(StopRound, AllStopWhereTheFirstOfThemIs) {
  Membership members(3);
  StopRound stops(members);
  members.on_come(0);
  members.on_come(1);
  stops.on_asked();
  EXPECT_FALSE(stops.due()) << "somebody is missing";
  members.on_come(2);
  EXPECT_EQ(stops.due()->type, Type::kFreeze);
  EXPECT_FALSE(stops.due()) << "they have been told";
  stops.on_frozen(0, 7);
  stops.on_frozen(2, 9);
  EXPECT_FALSE(stops.due());
  members.on_left(2, {});
  stops.on_left(2);
  EXPECT_FALSE(stops.due()) << "it waits nowhere, and rank 1 has not answered";
  stops.on_frozen(2, 11);
  stops.on_frozen(1, 8);
  const auto decided = stops.due();
  ASSERT_TRUE(decided);
  EXPECT_EQ(decided->type, Type::kStopAt);
  EXPECT_EQ(decided->progress, 8);
  EXPECT_FALSE(stops.due()) << "once";
}

// ------------------------------------------------------------ DeadlockSearch

class DeadlockSearchTest : public testing::Test {
 protected:
  void waits(int rank, milliseconds at, std::string collectives = {}) {
    LivenessFrame status;
    status.is_blocked = true;
    status.text = "a wait";
    status.collectives = std::move(collectives);
    search_.on_status(rank, status, kStart + at);
  }

  Membership members_ = complete(2);
  DeadlockSearch search_{members_, milliseconds(400), milliseconds(1000)};
};

TEST_F(DeadlockSearchTest, AGoodbyeFreesThoseWhoWait) {
  Membership members = complete(3);
  DeadlockSearch search(members, milliseconds(400), milliseconds(1000));
  LivenessFrame status;
  status.is_blocked = true;
  status.text = "a wait";
  for (const int at : {0, 300, 600}) {
    for (const int rank : {0, 1}) {
      search.on_status(rank, status, kStart + milliseconds(at));
    }
  }
  EXPECT_FALSE(search.find(kStart + milliseconds(650))) << "rank 2 is silent";
  members.on_left(2, {});
  search.on_left(kStart + milliseconds(650));
  EXPECT_FALSE(search.find(kStart + milliseconds(700)));
  const auto table = search.find(kStart + milliseconds(1060));
  ASSERT_TRUE(table);
  EXPECT_EQ(table->find("global_rank 2 has left"), 0u) << *table;
}

TEST_F(DeadlockSearchTest, ACollectiveThatAllHaveEnteredGoesOn) {
  CollectiveLog log;
  CollectiveId call{.group = 6, .signature = 2, .ranks = {0, 1}};
  log.enter(call);
  const std::string entered = log.state(call).encode();
  for (const int at : {0, 300, 600}) {
    waits(0, milliseconds(at), entered);
    waits(1, milliseconds(at), entered);
  }
  EXPECT_FALSE(search_.find(kStart + milliseconds(700)));
  waits(1, milliseconds(650), CollectiveLog().state(std::nullopt).encode());
  EXPECT_TRUE(search_.find(kStart + milliseconds(700)));
}

// Ranks of a large group say so in a bit each.
TEST(CollectiveState, ManyRanksAreFewBytes) {
  CollectiveLog log;
  CollectiveId call{.group = 6, .signature = 2};
  for (int rank = 8191; rank >= 0; --rank) call.ranks.push_back(rank);
  log.enter(call);
  const std::string bytes = log.state(call).encode();
  EXPECT_LT(bytes.size(), 2000u);
  const auto state = CollectiveLog::State::decode(bytes);
  ASSERT_TRUE(state.waits_for);
  EXPECT_EQ(state.waits_for->ranks.size(), 8192u);
  EXPECT_EQ(state.waits_for->ranks[5], 5);
  call.ranks = {70'000, 3};  // a list is shorter
  const auto few = CollectiveLog::State::decode(log.state(call).encode());
  EXPECT_EQ(few.waits_for->ranks, call.ranks);
  EXPECT_LT(log.state(call).encode().size(), 200u);
}

}  // namespace
}  // namespace smp::health
