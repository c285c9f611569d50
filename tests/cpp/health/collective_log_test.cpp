#include "csrc/health/collective_log.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace smp::health {
namespace {

CollectiveId call(uint64_t group, uint64_t signature) {
  CollectiveId id;
  id.group = group;
  id.signature = signature;
  id.ranks = {3, 5};
  return id;
}

CollectiveLog::State sent(const CollectiveLog& log) {
  return CollectiveLog::State::decode(log.state(std::nullopt).encode());
}

TEST(CollectiveLog, RankHasEnteredWhatItHasIssuedAsTheSameCall) {
  CollectiveLog mine;
  CollectiveLog theirs;
  CollectiveId id = call(7, 70);
  mine.enter(id);
  EXPECT_EQ(id.sequence, 1);
  EXPECT_FALSE(sent(theirs).has_entered(id)) << "nothing yet";
  CollectiveId elsewhere = call(8, 70);
  theirs.enter(elsewhere);
  EXPECT_FALSE(sent(theirs).has_entered(id)) << "of another group";
  CollectiveId same = call(7, 70);
  theirs.enter(same);
  EXPECT_TRUE(sent(theirs).has_entered(id));
  CollectiveId second = call(7, 71);
  mine.enter(second);
  CollectiveId other = call(7, 99);
  theirs.enter(other);
  EXPECT_FALSE(sent(theirs).has_entered(second)) << "another call";
  EXPECT_TRUE(sent(theirs).has_entered(id)) << "it went on";
}

TEST(CollectiveLog, WhoIsFarAheadIsNotCompared) {
  CollectiveLog mine;
  CollectiveLog theirs;
  CollectiveId id = call(7, 70);
  mine.enter(id);
  for (size_t i = 0; i <= CollectiveLog::kNumSignatures; ++i) {
    CollectiveId other = call(7, 99);
    theirs.enter(other);
  }
  EXPECT_TRUE(sent(theirs).has_entered(id));
}

TEST(CollectiveLog, WhatDoesNotGoOnAloneNeedsARankThatWaitsInItsGroup) {
  CollectiveLog mine;
  CollectiveLog theirs;
  CollectiveId id = call(7, 70);
  id.goes_on_alone = false;
  mine.enter(id);
  CollectiveId same = call(7, 70);
  theirs.enter(same);
  EXPECT_FALSE(sent(theirs).has_entered(id));
  EXPECT_TRUE(CollectiveLog::State::decode(theirs.state(same).encode())
                  .has_entered(id));
}

TEST(CollectiveLog, StateIsToldWhole) {
  CollectiveLog log;
  CollectiveId id = call(7, 70);
  id.num_bytes = int64_t{1} << 40;
  log.enter(id);
  const auto state = CollectiveLog::State::decode(log.state(id).encode());
  ASSERT_TRUE(state.waits_for);
  EXPECT_EQ(state.waits_for->num_bytes, id.num_bytes);
  EXPECT_EQ(state.waits_for->ranks, id.ranks);
  EXPECT_EQ(state.waits_for->sequence, 1);
  EXPECT_TRUE(state.waits_for->goes_on_alone);
}

TEST(CollectiveLog, CountsBelowZeroAreNothing) {
  CollectiveLog::State state;
  CollectiveId id;
  id.group = 1;
  id.sequence = std::numeric_limits<int64_t>::min();
  state.waits_for = id;
  EXPECT_FALSE(CollectiveLog::State::decode(state.encode()).waits_for);
  state.waits_for.reset();
  state.groups.push_back({.group = 1, .num_entered = -1});
  EXPECT_TRUE(CollectiveLog::State::decode(state.encode()).groups.empty());
  state.groups.back().num_entered = 1;
  EXPECT_EQ(CollectiveLog::State::decode(state.encode()).groups.size(), 1U);
}

TEST(CollectiveLog, BytesWithoutSenseAreNothing) {
  CollectiveLog log;
  CollectiveId id = call(7, 70);
  log.enter(id);
  const std::string right = log.state(id).encode();
  EXPECT_FALSE(CollectiveLog::State::decode("").waits_for);
  EXPECT_FALSE(CollectiveLog::State::decode(right.substr(1)).waits_for);
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = right;
    bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)CollectiveLog::State::decode(bytes).has_entered(id);
  }
}

}  // namespace
}  // namespace smp::health
