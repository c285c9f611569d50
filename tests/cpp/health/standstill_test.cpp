#include "csrc/health/standstill.h"

#include <gtest/gtest.h>

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

RankState waiting(int rank, milliseconds waits_for, milliseconds unmoved_for) {
  return {.global_rank = rank,
          .waits = true,
          .waits_for = waits_for,
          .unmoved_for = unmoved_for};
}

RankState working(int rank, milliseconds unmoved_for) {
  return {.global_rank = rank, .unmoved_for = unmoved_for};
}

TEST(Standstill, NobodyWaitsForRanksThatAllWork) {
  EXPECT_FALSE(find_standstill({}));
  EXPECT_FALSE(find_standstill({working(0, seconds(900)), working(1, {})}));
}

TEST(Standstill, RankThatNeitherWaitsNorMovesIsStuck) {
  const auto found = find_standstill({working(1, seconds(20)),
                                      waiting(0, seconds(30), seconds(30)),
                                      waiting(2, seconds(19), seconds(2))});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stuck, std::vector<int>{1});
  EXPECT_EQ(found->lasts, seconds(20));
}

TEST(Standstill, TimeInWhichNobodyWaitedDoesNotCount) {
  const auto found = find_standstill(
      {working(1, seconds(900)), waiting(0, seconds(3), seconds(3))});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->lasts, seconds(3));
}

TEST(Standstill, AnyRankThatDoesNotWaitAndMovesIsNone) {
  const auto found = find_standstill({working(1, seconds(900)),
                                      waiting(0, seconds(900), seconds(900)),
                                      working(2, milliseconds(5))});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->lasts, milliseconds(5));
  EXPECT_EQ(found->stuck, (std::vector<int>{1, 2}));
}

TEST(Standstill, WhereAllWaitNobodyIsStuck) {
  const auto found = find_standstill(
      {waiting(0, seconds(9), seconds(4)), waiting(1, seconds(8), seconds(5))});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->lasts, seconds(4));
  EXPECT_TRUE(found->stuck.empty());
}

TEST(Standstill, SilentRankIsStuckWhateverItSaidLast) {
  RankState silent = waiting(1, seconds(30), seconds(8));
  silent.is_silent = true;
  auto found = find_standstill({waiting(0, seconds(20), seconds(20)), silent});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stuck, std::vector<int>{1});
  EXPECT_EQ(found->lasts, seconds(8));
  EXPECT_TRUE(found->is_heard);
  found = find_standstill({silent});
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->is_heard) << "perhaps it is the hub that hears nothing";
}

TEST(Standstill, RankThatHasLeftIsNoneOfThem) {
  RankState gone = working(1, seconds(900));
  gone.has_left = true;
  const auto found = find_standstill(
      {gone, waiting(0, seconds(9), seconds(9)), working(2, seconds(7))});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stuck, std::vector<int>{2});
  EXPECT_EQ(found->lasts, seconds(7));
}

}  // namespace
}  // namespace smp::health
