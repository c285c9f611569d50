#include "csrc/health/fault_board.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/wait_registry.h"
#include "tests/cpp/common/expectations.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using Kind = Fault::Kind;

Fault raised(int global_rank, std::string where, std::string text) {
  return {.kind = Kind::kRaised,
          .global_rank = global_rank,
          .where = std::move(where),
          .text = std::move(text)};
}

TEST(FaultBoard, FirstFaultWins) {
  FaultBoard board(0);
  EXPECT_FALSE(board.fault());
  EXPECT_NO_THROW(board.raise_if_faulted());
  EXPECT_TRUE(board.report(raised(0, "here", "first")));
  EXPECT_FALSE(board.report(raised(0, "there", "second")));
  EXPECT_EQ(board.fault()->text, "first");
  EXPECT_THROW(board.raise_if_faulted(), PeerFailure);
}

TEST(FaultBoard, HoldHidesFaultsOfRanksThatAreNotNeeded) {
  FaultBoard board(0);
  int num_wakes = 0;
  board.subscribe([&] { ++num_wakes; });
  board.hold({0, 1}, seconds(60));
  board.report(raised(2, "", "elsewhere"));
  EXPECT_FALSE(board.fault());
  EXPECT_NO_THROW(board.raise_if_faulted());
  EXPECT_EQ(board.known_fault()->global_rank, 2);
  EXPECT_EQ(num_wakes, 1);
  board.release();
  EXPECT_EQ(num_wakes, 2) << "waits are woken by the fault that was hidden";
  EXPECT_THROW(board.raise_if_faulted(), PeerFailure);
}

TEST(FaultBoard, HoldHidesNeitherNeededRanksNorThisOneNorAllOfThem) {
  for (const int culprit : {-1, 0, 1}) {
    FaultBoard board(0);
    board.hold({0, 1}, seconds(60));
    board.report(raised(culprit, "", "here"));
    EXPECT_TRUE(board.fault()) << culprit;
  }
}

TEST(FaultBoard, HoldHidesAFaultForItsLimitOnly) {
  FaultBoard board(0);
  board.report(raised(2, "", "elsewhere"));
  board.hold({}, milliseconds(0));
  EXPECT_TRUE(board.fault());
  board.hold({}, seconds(60));
  EXPECT_FALSE(board.fault());
}

TEST(FaultBoard, OneOfManyConcurrentReportsIsFirst) {
  FaultBoard board(0);
  std::atomic<int> num_first = 0;
  std::atomic<int> num_wakes = 0;
  board.subscribe([&] { ++num_wakes; });
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      if (board.report(raised(0, "", std::to_string(i)))) ++num_first;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_first, 1);
  EXPECT_EQ(num_wakes, 1);
}

TEST(FaultBoard, DescribesRankCoordinatesPlaceAndReason) {
  FaultBoard board(3);
  board.set_coordinates({"pp 0", "pp 1", "pp 2", "pp 3 tp 0 rdp 1"});
  board.report(raised(3, "module 'transformer.h.5', microbatch 2", "boom"));
  EXPECT_EQ(board.fault()->describe(),
            "global_rank 3 (pp 3 tp 0 rdp 1) raised in module "
            "'transformer.h.5', microbatch 2: boom");
}

TEST(FaultBoard, DescribesEachKind) {
  const Fault died{.kind = Kind::kDied, .global_rank = 1};
  EXPECT_EQ(died.describe(),
            "global_rank 1 died: its connection closed without a goodbye "
            "(killed or crashed)");
  const Fault left{
      .kind = Kind::kLeft, .global_rank = 2, .text = "while we wait"};
  EXPECT_EQ(left.describe(),
            "global_rank 2 has left (its script has finished) while we wait");
  const Fault cut_off{
      .kind = Kind::kUnreachable, .global_rank = 2, .text = "no cable"};
  EXPECT_EQ(cut_off.describe(),
            "global_rank 2: its host cannot be reached: no cable");
  const Fault deadlock{.kind = Kind::kDeadlock, .text = "table"};
  EXPECT_EQ(deadlock.describe(), "deadlock: table");
  const Fault unknown{.kind = Kind::kDied, .text = "gone"};
  EXPECT_EQ(
      unknown.describe(),
      "a rank (which one is not known) died or its connection broke: gone");
}

TEST(FaultBoard, DoesNotPrintOwnFault) {
  FaultBoard board(1);
  testing::internal::CaptureStderr();
  board.report(raised(1, "", "mine"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(FaultBoard, WakesSubscribersUntilTheyUnsubscribe) {
  FaultBoard board(0);
  int num_wakes = 0;
  const int token = board.subscribe([&] { ++num_wakes; });
  board.mark_left(1);
  EXPECT_EQ(num_wakes, 1);
  board.mark_left(1);  // nothing new
  EXPECT_EQ(num_wakes, 1);
  board.unsubscribe(token);
  board.report(raised(0, "", "x"));
  EXPECT_EQ(num_wakes, 1);
}

TEST(FaultBoard, LeavingIsNoFault) {
  FaultBoard board(0);
  board.mark_left(2);
  EXPECT_TRUE(board.has_left(2));
  EXPECT_FALSE(board.has_left(1));
  EXPECT_FALSE(board.fault());
}

TEST(FaultBoard, KnowsTheFirstRankAtAnAddress) {
  FaultBoard board(0);
  EXPECT_EQ(board.rank_at("10.0.0.1"), -1);
  board.set_addresses({"10.0.0.1", "10.0.0.1", "", "10.0.0.2", "10.0.0.2"});
  EXPECT_EQ(board.rank_at("10.0.0.1"), 0);
  EXPECT_EQ(board.rank_at("10.0.0.2"), 3);
  EXPECT_EQ(board.rank_at("10.0.0.3"), -1);
  EXPECT_EQ(board.rank_at(""), -1) << "not known is no address";
}

TEST(FaultBoard, UnsubscribeWaitsForRunningWake) {
  FaultBoard board(0);
  std::atomic<bool> is_inside = false;
  std::atomic<bool> has_ended = false;
  const int token = board.subscribe([&] {
    is_inside = true;
    std::this_thread::sleep_for(milliseconds(50));
    has_ended = true;
  });
  std::thread reporter([&] { board.mark_left(1); });
  while (!is_inside) std::this_thread::yield();
  board.unsubscribe(token);
  EXPECT_TRUE(has_ended);
  reporter.join();
}

TEST(WaitRegistry, AsksSourcesOnlyWhileItWaits) {
  WaitRegistry registry;
  int64_t num_asked = 0;
  registry.add_source([&] { return ++num_asked; });
  registry.snapshot();
  EXPECT_EQ(num_asked, 0);
  const BlockedScope scope(registry, "a");
  EXPECT_EQ(registry.snapshot().progress, 1);
  EXPECT_EQ(registry.snapshot().progress, 2);
}

TEST(WaitRegistry, ShowsNewestWaitAndCountsItsEndAsProgress) {
  WaitRegistry registry;
  EXPECT_FALSE(registry.snapshot().is_blocked);
  {
    BlockedScope outer(registry, "step 3");
    BlockedScope inner(registry);
    EXPECT_EQ(registry.snapshot().what, "step 3");
    inner.update(true, "barrier");
    EXPECT_EQ(registry.snapshot().what, "barrier");
    inner.update(true, "barrier, waiting for 1");
    EXPECT_EQ(registry.snapshot().what, "barrier, waiting for 1");
    inner.update(false, {});
    EXPECT_TRUE(registry.snapshot().is_blocked);
    EXPECT_EQ(registry.snapshot().progress, 1);
  }
  EXPECT_FALSE(registry.snapshot().is_blocked);
  EXPECT_EQ(registry.snapshot().progress, 2);
}

TEST(WaitRegistry, MeasuresTheWaitFromItsBegin) {
  WaitRegistry registry;
  BlockedScope scope(registry, "first");
  std::this_thread::sleep_for(milliseconds(20));
  scope.update(true, "second");
  EXPECT_GE(registry.snapshot().blocked_for, milliseconds(20));
}

// A wait on something that only `finish` makes true.
class Gate {
 public:
  explicit Gate(FaultBoard& board) : board_(board) {
    token_ = board.subscribe([this] {
      std::lock_guard lock(mutex_);
      changed_.notify_all();
    });
  }
  ~Gate() { board_.unsubscribe(token_); }

  void finish() {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

  void wait(milliseconds timeout, std::vector<int> missing) {
    WaitSpec spec{.what = "gate", .timeout = timeout, .hint = "open it"};
    spec.missing = [missing] { return missing; };
    FaultAwareWait wait(board_, std::move(spec));
    std::unique_lock lock(mutex_);
    wait.until(lock, changed_, [this] { return is_open_; });
  }

 private:
  FaultBoard& board_;
  int token_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

TEST(FaultAwareWait, ReturnsWhenTrueAndIsBlockedMeanwhile) {
  FaultBoard board(0);
  Gate gate(board);
  std::thread waiter([&] { gate.wait(kPatience, {1, 2}); });
  while (!board.waits().snapshot().is_blocked) std::this_thread::yield();
  EXPECT_EQ(board.waits().snapshot().what,
            "gate, waiting for global_ranks 1 2");
  gate.finish();
  waiter.join();
  EXPECT_FALSE(board.waits().snapshot().is_blocked);
}

TEST(FaultAwareWait, EndsWithAFault) {
  FaultBoard board(0);
  Gate gate(board);
  std::thread reporter([&] {
    while (!board.waits().snapshot().is_blocked) std::this_thread::yield();
    board.report(raised(0, "", "boom"));
  });
  EXPECT_THROW(gate.wait(kPatience, {}), PeerFailure);
  reporter.join();
}

TEST(FaultAwareWait, TimeoutNamesWhatAndWho) {
  FaultBoard board(0);
  Gate gate(board);
  EXPECT_EQ(error_of([&] { gate.wait(milliseconds(30), {4}); }),
            "timed out after 0.03 s in gate, waiting for global_rank 4; open "
            "it");
}

TEST(FaultAwareWait, EndsAWhileAfterANeededRankHasLeft) {
  FaultBoard board(0);
  board.set_coordinates({"pp 0", "pp 1"});
  board.mark_left(1);
  Gate gate(board);
  const auto begin = Clock::now();
  EXPECT_EQ(error_of([&] { gate.wait(kPatience, {1}); }),
            "global_rank 1 (pp 1) has left (its script has finished) while "
            "global_rank 0 waits for it in gate");
  EXPECT_GE(Clock::now() - begin, FaultAwareWait::kLeftGrace);
  ASSERT_TRUE(board.fault());  // for the other ranks, which name it too
  EXPECT_EQ(board.fault()->global_rank, 1);
}

TEST(FaultAwareWait, RunsTheInterruptCheckWithoutTheLock) {
  FaultBoard board(0);
  Gate gate(board);
  board.set_interrupt_check([&] {
    gate.finish();  // takes the lock
    throw Error("interrupted");
  });
  EXPECT_EQ(error_of([&] { gate.wait(seconds(10), {}); }), "interrupted");
}

TEST(FaultBoard, OneRankPrintsOneLineOfARankThatCannotSayItself) {
  const auto printed = [](int global_rank, Fault fault) {
    FaultBoard board(global_rank);
    ::testing::internal::CaptureStderr();
    board.report(std::move(fault));
    return ::testing::internal::GetCapturedStderr();
  };
  const Fault died{
      .kind = Fault::Kind::kDied, .global_rank = 2, .text = "a\nb"};
  EXPECT_EQ(printed(0, died),
            "smp error: global_rank 2 died or its connection broke: a\n");
  EXPECT_EQ(printed(1, died), "");
  EXPECT_EQ(printed(3, died), "");
  const Fault first{.kind = Fault::Kind::kDied, .global_rank = 0, .text = "a"};
  EXPECT_NE(printed(1, first), "");
  EXPECT_EQ(printed(2, first), "");
  // A rank that raised prints a traceback of its own.
  EXPECT_EQ(printed(0, raised(2, "here", "boom")), "");
}

}  // namespace
}  // namespace smp::health
