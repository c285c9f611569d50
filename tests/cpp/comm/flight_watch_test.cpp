#include "csrc/comm/flight_watch.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "csrc/comm/group_wait.h"
#include "csrc/comm/watched_communicator.h"
#include "csrc/common/check.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/stream_group.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using Kind = health::Fault::Kind;

bool becomes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

// The watch of global rank 0, and what it watches.
struct Watched {
  explicit Watched(FlightWatch::Options options = {}) {
    options.look_every = milliseconds(5);
    options.grace = milliseconds(50);
    watch = std::make_shared<FlightWatch>(board, options);
  }

  void fly(const std::function<bool()>& is_over) {
    watch->add({.is_over = is_over,
                .what = "all_reduce over dp (2 ranks)",
                .ranks = {0, 1}});
  }
  std::optional<health::Fault> fault_soon() const {
    becomes_true([this] { return board->fault().has_value(); });
    return board->fault();
  }

  std::shared_ptr<health::FaultBoard> board =
      std::make_shared<health::FaultBoard>(0);
  FlightWatchPtr watch;
};

TEST(FlightWatch, ACollectiveThatEndsIsProgressAndNoFault) {
  Watched watched({.timeout = milliseconds(300)});
  std::atomic<bool> is_over = false;
  watched.fly([&] { return is_over.load(); });
  EXPECT_EQ(watched.watch->num_in_flight(), 1);
  const int64_t before = watched.board->waits().snapshot().progress;
  is_over = true;
  EXPECT_TRUE(
      becomes_true([&] { return watched.watch->num_in_flight() == 0; }));
  EXPECT_EQ(watched.board->waits().snapshot().progress, before + 1);
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_FALSE(watched.board->fault());
}

TEST(FlightWatch, DeviceThatWaitsForLongIsToldToTheRegistry) {
  Watched watched(
      {.timeout = milliseconds(60'000), .waits_after = milliseconds(50)});
  const auto waits = [&] {
    return watched.board->waits().snapshot().device_waits;
  };
  EXPECT_FALSE(waits());
  std::atomic<bool> is_over = false;
  watched.fly([&] { return is_over.load(); });
  EXPECT_TRUE(becomes_true(waits));
  EXPECT_FALSE(watched.board->waits().snapshot().is_blocked)
      << "the host may do other things";
  is_over = true;
  EXPECT_TRUE(becomes_true([&] { return !waits(); }));
}

TEST(FlightWatch, OneThatDoesNotEndIsAFaultOfThisRank) {
  Watched watched({.timeout = milliseconds(100)});
  watched.fly([] { return false; });
  const auto fault = watched.fault_soon();
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kRaised);
  EXPECT_EQ(fault->global_rank, 0);
  EXPECT_NE(fault->text.find("ms for the all_reduce over dp (2 ranks)"),
            std::string::npos)
      << fault->text;
}

TEST(FlightWatch, TimeCountsFromWhatEndedLast) {
  Watched watched({.timeout = milliseconds(400)});
  std::atomic<int> num_over = 0;
  for (int i = 0; i < 6; ++i) {
    watched.fly([&, i] { return num_over > i; });
  }
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(milliseconds(150));
    ++num_over;
  }
  EXPECT_TRUE(
      becomes_true([&] { return watched.watch->num_in_flight() == 0; }));
  EXPECT_FALSE(watched.board->fault());
}

TEST(FlightWatch, ARankThatHasLeftIsNamed) {
  Watched watched;
  watched.fly([] { return false; });
  watched.board->mark_left(1);
  const auto fault = watched.fault_soon();
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kLeft);
  EXPECT_EQ(fault->global_rank, 1);
}

TEST(FlightWatch, ADeviceThatFailsIsAFault) {
  Watched watched;
  watched.fly([]() -> bool { throw std::runtime_error("device lost"); });
  const auto fault = watched.fault_soon();
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->text, "all_reduce over dp (2 ranks): device lost");
}

// The host waits for the device only, and the device for a rank that is gone:
// only the watch can end that.
TEST(FlightWatch, AFaultEndsWhatIsInFlight) {
  const auto world = make_local_world(2);
  const CommunicatorPtr group = std::make_shared<StreamGroup>(world[0]);
  const auto board = std::make_shared<health::FaultBoard>(0);
  const auto watch =
      std::make_shared<FlightWatch>(board, FlightWatch::Options{});
  const auto watched = make_watched_communicator(group, board, {0, 1}, watch);
  const at::Tensor tensor = at::full({4}, 1.0);
  const WorkPtr work = watched->all_reduce(tensor, ReduceOp::kSum);
  watch->add({.is_over = [] { return false; }, .what = "one", .ranks = {0, 1}});
  std::thread host([&] {  // as a synchronisation with the device
    EXPECT_NE(error_of([&] { work->order_stream(); }), "no error");
  });
  std::this_thread::sleep_for(milliseconds(50));
  board->report({.kind = Kind::kDied, .global_rank = 1});
  host.join();
  // No further call begins, on a device that would wait for ever.
  EXPECT_THROW(watched->all_reduce(tensor, ReduceOp::kSum), PeerFailure);
  WaitOptions wait;
  wait.faults = board;
  EXPECT_THROW(follow(*work, wait, *watched, "sum"), PeerFailure);
}

TEST(FlightWatch, OnlyWhatTheHostGoesOnWithoutIsWatched) {
  run_ranks(2, [](int rank, const CommunicatorPtr& comm) {
    const auto board = std::make_shared<health::FaultBoard>(rank);
    FlightWatch::Options slow;
    slow.look_every = std::chrono::minutes(1);
    const auto watch = std::make_shared<FlightWatch>(board, slow);
    const auto plain = make_watched_communicator(comm, board, {0, 1}, watch);
    const auto group = make_watched_communicator(
        std::make_shared<StreamGroup>(comm), board, {0, 1}, watch);
    WaitOptions wait;
    wait.faults = board;
    const at::Tensor tensor = at::full({4}, 1.0);
    follow(*plain->all_reduce(tensor, ReduceOp::kSum), wait, *plain, "a");
    EXPECT_EQ(watch->num_in_flight(), 0);
    const WorkPtr work = group->all_reduce(tensor, ReduceOp::kSum);
    EXPECT_EQ(watch->num_in_flight(), 0);
    follow(*work, wait, *group, "b");
    EXPECT_EQ(tensor.sum().item<double>(), 16);
    EXPECT_LE(watch->num_in_flight(), 1);
    EXPECT_THROW(work->wait(milliseconds(1)), Error);
  });
}

TEST(FlightWatch, EveryCollectiveOfADeviceIsWatched) {
  run_ranks(2, [](int rank, const CommunicatorPtr& comm) {
    const auto board = std::make_shared<health::FaultBoard>(rank);
    FlightWatch::Options slow;
    slow.look_every = std::chrono::minutes(1);
    const auto watch = std::make_shared<FlightWatch>(board, slow);
    // After the watch has looked once, it counts what comes and takes nothing.
    std::atomic<bool> has_looked = false;
    watch->add({.is_over = [&] { return has_looked = true, false; },
                .what = "one",
                .ranks = {0, 1}});
    while (!has_looked) std::this_thread::yield();
    const auto group = make_watched_communicator(
        std::make_shared<StreamGroup>(comm), board, {0, 1}, watch);
    WaitOptions wait;
    wait.faults = board;
    int expected = 1;
    const auto check = [&](const char* what, const WorkPtr& work) {
      follow(*work, wait, *group, what);
      EXPECT_EQ(watch->num_in_flight(), ++expected) << what;
    };
    const at::Tensor part = at::full({2}, 1.0);
    const at::Tensor whole = at::full({4}, 1.0);
    const auto sum = ReduceOp::kSum;
    check("all_reduce", group->all_reduce(at::full({4}, 1.0), sum));
    check("broadcast", group->broadcast(at::full({4}, 1.0), 0));
    check("all_gather", group->all_gather(at::full({4}, 0.0), part));
    check("reduce_scatter",
          group->reduce_scatter(at::full({2}, 0.0), whole, sum));
    check("all_to_all", group->all_to_all(at::full({4}, 0.0), whole));
    check("all_to_all_v",
          group->all_to_all_v(at::full({4}, 0.0), whole, {2, 2}, {2, 2}));
  });
}

}  // namespace
}  // namespace smp::comm
