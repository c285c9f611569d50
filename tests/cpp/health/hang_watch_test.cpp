#include "csrc/health/hang_watch.h"

#include <gtest/gtest.h>

#include <chrono>

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

LivenessFrame status(bool is_blocked, int64_t progress, std::string text) {
  LivenessFrame frame;
  frame.is_blocked = is_blocked;
  frame.progress = progress;
  frame.text = std::move(text);
  return frame;
}

class HangWatchTest : public ::testing::Test {
 protected:
  void tell(int rank, bool is_blocked, int64_t progress, std::string text) {
    watch.on_status(rank, status(is_blocked, progress, std::move(text)), now);
  }

  HangWatch::Clock::time_point now = HangWatch::Clock::now();
  HangWatch watch{2, seconds(10)};
};

TEST_F(HangWatchTest, RankThatDoesNotWaitIsNamedWithItsWork) {
  tell(0, true, 5, "step call 3");
  tell(1, false, 7, "module 'h.1', microbatch 2");
  now += seconds(9);
  tell(0, true, 5, "step call 3");
  tell(1, false, 7, "module 'h.1', microbatch 2");
  EXPECT_FALSE(watch.due_report(now));
  now += seconds(2);
  const auto report = watch.due_report(now);
  ASSERT_TRUE(report);
  EXPECT_NE(report->find("global_rank 0: waits in step call 3 since 11.0 s"),
            std::string::npos)
      << *report;
  EXPECT_NE(report->find("global_rank 1: DOES NOT WAIT since 11.0 s; module "
                         "'h.1', microbatch 2"),
            std::string::npos)
      << *report;
  now += seconds(5);
  EXPECT_FALSE(watch.due_report(now)) << "not again so soon";
  now += seconds(5);
  EXPECT_TRUE(watch.due_report(now)) << "but as long as it lasts";
}

TEST_F(HangWatchTest, WhatWaitingRanksStillFindToDoHidesNothing) {
  tell(1, false, 7, "module 'h.1', microbatch 2");
  for (int second = 0; second < 10; ++second) {
    tell(0, true, second, "step call 3");
    tell(1, false, 7, "module 'h.1', microbatch 2");
    EXPECT_FALSE(watch.due_report(now)) << second;
    now += seconds(1);
  }
  EXPECT_TRUE(watch.due_report(now));
}

TEST_F(HangWatchTest, RankThatHasSaidNothingDoesNotWait) {
  tell(1, true, 7, "what it waited for when it was stopped");
  for (int second = 0; second < 10; ++second) {
    tell(0, true, second, "step call 3");
    EXPECT_FALSE(watch.due_report(now)) << second;
    now += seconds(1);
  }
  EXPECT_TRUE(watch.due_report(now));
}

TEST_F(HangWatchTest, StacksAreShownWhenAllAreThereOrLate) {
  tell(0, true, 5, "");
  tell(1, false, 7, "");
  EXPECT_FALSE(watch.due_stacks(now)) << "nobody asked";
  now += seconds(11);
  ASSERT_TRUE(watch.due_report(now));
  watch.on_stacks(1, "File user.py");
  EXPECT_FALSE(watch.due_stacks(now));
  now += seconds(4);
  const auto stacks = watch.due_stacks(now);
  ASSERT_TRUE(stacks);
  EXPECT_NE(stacks->find("global_rank 1\nFile user.py"), std::string::npos);
  EXPECT_NE(stacks->find("global_rank 0\n(it gives none)"), std::string::npos);
  EXPECT_FALSE(watch.due_stacks(now)) << "once";
}

TEST_F(HangWatchTest, SilentRankIsNamed) {
  tell(0, true, 5, "");
  tell(1, false, 7, "");
  now += seconds(11);
  tell(0, true, 5, "");
  const auto report = watch.due_report(now);
  ASSERT_TRUE(report);
  EXPECT_NE(report->find("global_rank 1 HAS SAID NOTHING for 11.0 s"),
            std::string::npos)
      << *report;
}

TEST_F(HangWatchTest, ProgressAnywhereAndWorkEverywhereAreNoHang) {
  tell(0, true, 5, "");
  tell(1, false, 7, "");
  now += seconds(11);
  tell(1, false, 8, "");
  EXPECT_FALSE(watch.due_report(now)) << "rank 1 moved";
  tell(0, false, 6, "");
  now += seconds(20);
  EXPECT_FALSE(watch.due_report(now)) << "nobody waits";
  HangWatch never(1, milliseconds(0));
  never.on_status(0, status(true, 0, ""), now);
  EXPECT_FALSE(never.due_report(now + seconds(1000)));
}

}  // namespace
}  // namespace smp::health
