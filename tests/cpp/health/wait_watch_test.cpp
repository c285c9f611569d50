#include "csrc/health/wait_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using Clock = WaitWatch::Clock;

bool turns_true(const std::atomic<bool>& flag) {
  const Clock::time_point give_up = Clock::now() + std::chrono::seconds(120);
  while (!flag && Clock::now() < give_up) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return flag;
}

TEST(WaitWatch, WakesAtTheDeadlineAndNotBefore) {
  WaitWatch watch;
  std::atomic<bool> woken = false;
  const Clock::time_point deadline = Clock::now() + milliseconds(60);
  std::atomic<Clock::time_point> when = Clock::time_point();
  WaitWatch::Scope scope(watch, deadline, [&] {
    when = Clock::now();
    woken = true;
  });
  ASSERT_TRUE(turns_true(woken));
  EXPECT_GE(when.load(), deadline);
}

TEST(WaitWatch, AnEarlierDeadlineIsServedFirst) {
  WaitWatch watch;
  std::atomic<bool> late_woken = false;
  std::atomic<bool> early_woken = false;
  WaitWatch::Scope late(watch, Clock::now() + std::chrono::hours(10),
                        [&] { late_woken = true; });
  WaitWatch::Scope early(watch, Clock::now() + milliseconds(20),
                         [&] { early_woken = true; });
  EXPECT_TRUE(turns_true(early_woken));
  EXPECT_FALSE(late_woken);
}

TEST(WaitWatch, ADeadlineInThePastWakesToo) {
  WaitWatch watch;
  for (int i = 0; i < 3; ++i) {
    std::atomic<bool> woken = false;
    WaitWatch::Scope scope(watch, Clock::now() - milliseconds(5),
                           [&] { woken = true; });
    EXPECT_TRUE(turns_true(woken)) << i;
  }
}

TEST(WaitWatch, AScopeThatEndedIsNotWoken) {
  WaitWatch watch;
  std::atomic<bool> first_woken = false;
  std::atomic<bool> second_woken = false;
  {
    WaitWatch::Scope scope(watch, Clock::now() + milliseconds(20),
                           [&] { first_woken = true; });
  }
  WaitWatch::Scope scope(watch, Clock::now() + milliseconds(40),
                         [&] { second_woken = true; });
  EXPECT_TRUE(turns_true(second_woken));
  EXPECT_FALSE(first_woken);
}

TEST(WaitWatch, AbortWakesThoseThatWaitAndThoseThatCome) {
  WaitWatch watch;
  std::atomic<int> num_woken = 0;
  WaitWatch::Scope before(watch, Clock::time_point::max(),
                          [&] { ++num_woken; });
  EXPECT_FALSE(watch.aborted());
  watch.abort();
  watch.abort();
  EXPECT_TRUE(watch.aborted());
  EXPECT_EQ(num_woken, 1);
  WaitWatch::Scope after(watch, Clock::time_point::max(), [&] { ++num_woken; });
  EXPECT_EQ(num_woken, 2);
}

}  // namespace
}  // namespace smp::health
