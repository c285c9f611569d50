#include "csrc/health/hang_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

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

TEST_F(HangWatchTest, TaskThatWasHeldBackDoesNotEndTheWaitThatItInterrupts) {
  for (int second = 0; second < 10; ++second) {
    LivenessFrame waiting = status(second != 6, second, "step call 3");
    waiting.blocked_ms = second == 6 ? 0 : 1000 * second;
    watch.on_status(0, waiting, now);
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
  watch.on_stacks(1, "File user.py", now);
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

// The two ranks of a run that is ended: rank 1 loops, rank 0 waits for it.
class RaisingHangWatchTest : public ::testing::Test {
 protected:
  void tell(bool is_blocked, int64_t progress) {
    LivenessFrame frame = status(is_blocked, progress, "module 'h.1'");
    frame.where = "pp 1";
    watch.on_status(1, frame, now);
    watch.on_status(0, status(true, 5, "step call 3"), now);
  }
  // A second at a time, as the hub does; reports and faults are kept.
  void pass(int num_seconds, bool moves = false, bool answers = true) {
    for (int i = 0; i < num_seconds; ++i) {
      now += seconds(1);
      progress += moves ? 1 : 0;
      if (!is_silent) tell(false, progress);
      if (is_silent) watch.on_status(0, status(true, 5, "step call 3"), now);
      if (const auto report = watch.due_report(now)) {
        reports.push_back(*report);
        if (answers) watch.on_stacks(1, stacks(), now);
      }
      for (const int rank : watch.due_looks(now)) {
        ++num_looks;
        if (answers) watch.on_stacks(rank, stacks(), now);
      }
      watch.due_stacks(now);
      if (!fault) fault = watch.due_fault(now);
      if (!fault) num_before_fault = i + 1;
    }
  }

  std::string stacks() {
    if (is_busy) ++line;
    const std::string other = std::to_string(++other_line);
    return "Thread of the script (most recent call first):\n"
           "  File \"user.py\", line " +
           other + " in forward\n  File \"user.py\", line " +
           std::to_string(line) + " in main\n\nThread 0x1:\n  line " + other;
  }

  HangWatch::Clock::time_point now = HangWatch::Clock::now();
  HangWatch watch{2, seconds(10), /*raises=*/true};
  bool is_busy = false;
  int line = 0;
  int other_line = 0;
  int num_looks = 0;
  int64_t progress = 7;
  bool is_silent = false;
  std::vector<std::string> reports;
  std::optional<HangWatch::StuckRanks> fault;
  int num_before_fault = 0;
};

TEST_F(RaisingHangWatchTest, StuckRankIsAFaultAfterTwiceTheTime) {
  tell(false, progress);
  pass(30);
  ASSERT_EQ(reports.size(), 3U);
  EXPECT_NE(reports[0].find("the run ends when this has lasted 20.0 s and the "
                            "Python stack of no such rank changes "
                            "(SMP_HANG_ACTION=report: it does not)"),
            std::string::npos)
      << reports[0];
  ASSERT_TRUE(fault);
  EXPECT_GE(num_before_fault, 19);
  EXPECT_LE(num_before_fault, 24);
  EXPECT_EQ(fault->global_ranks, std::vector<int>{1});
  EXPECT_NE(fault->text.find("global_rank 1 (pp 1): DOES NOT WAIT since"),
            std::string::npos)
      << fault->text;
  EXPECT_NE(fault->text.find(" in forward\n"), std::string::npos)
      << fault->text;
  EXPECT_EQ(fault->text.find("global_rank 0"), std::string::npos);
}

TEST_F(RaisingHangWatchTest, SlowRankThatMovesIsNotEnded) {
  tell(false, progress);
  for (int round = 0; round < 20; ++round) {
    pass(9);
    pass(1, /*moves=*/true);
  }
  EXPECT_TRUE(reports.empty());
  EXPECT_FALSE(fault);
}

TEST_F(RaisingHangWatchTest, RankThatMovesAfterTheReportIsNotEnded) {
  tell(false, progress);
  pass(15);
  EXPECT_EQ(reports.size(), 1U);
  pass(1, /*moves=*/true);
  pass(18);
  EXPECT_FALSE(fault) << "the time begins again";
  pass(10);
  EXPECT_TRUE(fault);
}

TEST_F(RaisingHangWatchTest, RankWhoseScriptMovesIsReportedAndNotEnded) {
  tell(false, progress);
  is_busy = true;
  pass(90);
  EXPECT_FALSE(fault);
  ASSERT_GE(reports.size(), 8U);
  EXPECT_NE(reports[2].find("global_rank 1 (pp 1): DOES NOT WAIT since 30.0 s, "
                            "but its Python stack changes; module 'h.1'"),
            std::string::npos)
      << reports[2];
  EXPECT_NE(reports[2].find("the run goes on, because the Python stack of "
                            "global_rank 1 changes; SMP_TIMEOUT_S ends it"),
            std::string::npos)
      << reports[2];
  is_busy = false;
  pass(8);
  EXPECT_FALSE(fault);
  pass(12);
  EXPECT_TRUE(fault) << "its script moves no more";
}

TEST_F(RaisingHangWatchTest, FewLooksThatShowTheSameAreNoFault) {
  tell(false, progress);
  for (int look = 0; look < 10; ++look) {
    pass(3, false, /*answers=*/false);
    watch.on_stacks(1, stacks(), now);  // late: the machine is busy
  }
  EXPECT_FALSE(fault) << "a stack may be the same by chance";
  pass(4);
  EXPECT_TRUE(fault);
}

TEST_F(RaisingHangWatchTest, RankThatDoesNotAnswerIsAskedOnce) {
  tell(false, progress);
  pass(19, false, /*answers=*/false);
  EXPECT_EQ(num_looks, 1);
}

TEST_F(RaisingHangWatchTest, StoppedRankGivesNoStackAndIsAFault) {
  tell(true, progress);
  pass(3);
  is_silent = true;
  pass(17);
  EXPECT_FALSE(fault) << "the time of its waits does not count";
  pass(17, false, /*answers=*/false);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->global_ranks, std::vector<int>{1});
  EXPECT_NE(fault->text.find("HAS SAID NOTHING for"), std::string::npos);
  EXPECT_NE(fault->text.find("(it gives no stack)"), std::string::npos);
}

TEST(HangWatch, StacksThatDoNotComeDelayTheNextReportAndNotTheFault) {
  HangWatch short_watch(2, seconds(3), /*raises=*/true);
  HangWatch::Clock::time_point now{};
  const auto begin = now;
  std::optional<HangWatch::StuckRanks> fault;
  short_watch.on_status(1, status(false, 7, "module 'h.1'"), now);
  int num_stacks = 0;
  while (!fault && now - begin < seconds(30)) {
    short_watch.on_status(0, status(true, 5, "step call 3"), now);
    short_watch.due_report(now);
    num_stacks += short_watch.due_stacks(now).has_value() ? 1 : 0;
    fault = short_watch.due_fault(now);
    now += milliseconds(250);
  }
  ASSERT_TRUE(fault) << "ranks are asked again and again";
  EXPECT_EQ(num_stacks, 2);
  EXPECT_LE(now - begin, seconds(11));
}

TEST_F(RaisingHangWatchTest, WhereAllWaitNoRankIsAFault) {
  for (int second = 0; second < 60; ++second) {
    tell(true, progress);
    if (watch.due_report(now)) reports.emplace_back();
    watch.due_stacks(now + seconds(3));
    ASSERT_FALSE(watch.due_fault(now));
    now += seconds(1);
  }
  EXPECT_FALSE(reports.empty());
}

TEST_F(RaisingHangWatchTest, PauseOfTheHubIsNoStandstill) {
  tell(false, progress);
  pass(5);
  now += seconds(100);
  watch.on_pause(seconds(100));
  EXPECT_FALSE(watch.due_report(now)) << "nobody could be heard";
  pass(6);
  EXPECT_EQ(reports.size(), 1U);
  EXPECT_FALSE(fault);
}

TEST_F(RaisingHangWatchTest, RankWhoseDeviceWaitsIsNotTheOne) {
  for (int second = 0; second < 30; ++second) {
    LivenessFrame host = status(false, 3, "step call 3");
    host.device_waits = true;
    watch.on_status(0, host, now);
    watch.on_status(1, status(false, 7, "step call 3"), now);
    watch.due_report(now);
    watch.due_stacks(now + seconds(3));
    if (!fault) fault = watch.due_fault(now);
    now += seconds(1);
  }
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->global_ranks, std::vector<int>{1});
}

TEST(InnermostLines, EachThreadIsCutAndNamed) {
  std::string stacks = "Thread of the script:\n";
  for (int i = 0; i < 20; ++i) stacks += "  frame " + std::to_string(i) + "\n";
  const std::string text = innermost_lines(stacks + "\nThread 0x1:\n  other\n");
  EXPECT_NE(text.find("  Thread of the script:\n    frame 0\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("frame 6"), std::string::npos) << text;
  EXPECT_NE(text.find("\n  Thread 0x1:\n    other"), std::string::npos) << text;
}

}  // namespace
}  // namespace smp::health
