#include "csrc/health/liveness.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using Kind = Fault::Kind;

TEST(Liveness, EndWithoutGoodbyeIsDeathOfThatRank) {
  World world(3);
  world.clients[1]->close();
  for (const int rank : {0, 2}) {
    const auto fault = world.fault_at(rank);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->kind, Kind::kDied);
    EXPECT_EQ(fault->global_rank, 1);
  }
}

TEST(Liveness, LeavingIsToldAndNoFault) {
  World world(3);
  world.clients[1]->leave();
  world.clients[1]->close();
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(becomes_true([&] { return world.boards[rank]->has_left(1); }));
  }
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(world.boards[0]->fault());
  EXPECT_FALSE(world.boards[2]->fault());
  world.leave_all();
}

TEST(Liveness, RaisedReachesAllOthersBeforeReportReturns) {
  World world(3);
  world.clients[2]->report_raised("module 'h.1', microbatch 0", "ValueError");
  world.clients[2]->close();  // dies right afterwards
  for (const int rank : {0, 1}) {
    const auto fault = world.fault_at(rank);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->describe(),
              "global_rank 2 raised in module 'h.1', microbatch 0: ValueError");
  }
  EXPECT_EQ(world.boards[2]->fault()->text, "ValueError");
}

TEST(Liveness, ExceptionReportedToTheBoardIsToldToo) {
  World world(2);
  world.boards[1]->report(
      {.kind = Kind::kRaised, .global_rank = 1, .text = "from a thread"});
  const auto fault = world.fault_at(0);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->text, "from a thread");
}

TEST(Liveness, EndOfTheHubIsDeathOfRankZero) {
  World world(2);
  world.hub.reset();
  const auto fault = world.fault_at(1);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kDied);
  EXPECT_EQ(fault->global_rank, 0);
  EXPECT_FALSE(world.boards[0]->fault());
}

TEST(Liveness, EndOfTheHubAfterRankZeroLeftIsNoFault) {
  World world(2);
  world.clients[0]->leave();
  world.clients[0]->close();
  world.hub.reset();
  EXPECT_TRUE(becomes_true([&] { return world.boards[1]->has_left(0); }));
  world.clients[1]->leave();
  world.clients[1]->close();
  EXPECT_FALSE(world.boards[1]->fault());
}

// The rank waits for the goodbyes of the others, which no longer come.
TEST(Liveness, EndOfTheHubIsDeathOfRankZeroForARankThatHasLeft) {
  World world(3);
  world.clients[1]->leave();
  world.hub.reset();
  const auto fault = world.fault_at(1);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kDied);
  EXPECT_EQ(fault->global_rank, 0);
}

TEST(Liveness, EndOfTheHubIsNoFaultForThoseWhoHaveLeftBeforeRankZero) {
  World world(3);
  world.clients[1]->leave();
  world.clients[0]->leave();
  world.hub.reset();  // rank 2 has not left, and rank 0 waits no longer
  for (const int rank : {1, 2}) {
    EXPECT_TRUE(becomes_true([&] { return world.boards[rank]->has_left(0); }));
  }
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_FALSE(world.boards[1]->fault());
  EXPECT_FALSE(world.boards[2]->fault());
}

TEST(Liveness, LingeringHubServesUntilAllHaveLeft) {
  World world(3);
  world.clients[0]->leave();
  std::thread closer([&] { world.hub->close(std::chrono::hours(1)); });
  world.clients[1]->close();  // dies while the hub lingers
  const auto fault = world.fault_at(2);
  world.clients[2]->leave();
  closer.join();
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->global_rank, 1);
}

TEST(Liveness, LateComerHearsWhatHappenedBefore) {
  World world(4, false);
  world.connect(0);
  world.connect(1);
  world.connect(2);
  world.clients[1]->leave();
  world.clients[2]->report_raised("", "early");
  world.connect(3);
  EXPECT_TRUE(becomes_true([&] { return world.boards[3]->has_left(1); }));
  const auto fault = world.fault_at(3);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->global_rank, 2);
}

TEST(Liveness, EveryRankBlockedIsADeadlockWithATable) {
  World world(2);
  world.boards[0]->set_coordinates({"pp 0", "pp 1"});
  BlockedScope first(world.boards[0]->waits(), "smp.barrier(WORLD)");
  BlockedScope second(world.boards[1]->waits(), "recv_from(0)");
  for (const int rank : {0, 1}) {
    const auto fault = world.fault_at(rank);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->kind, Kind::kDeadlock);
    EXPECT_NE(fault->text.find("global_rank 0 (pp 0): in smp.barrier(WORLD)"),
              std::string::npos)
        << fault->text;
    EXPECT_NE(fault->text.find("global_rank 1: in recv_from(0) since"),
              std::string::npos);
  }
}

TEST(Liveness, DeadlockOfThoseThatStayedNamesWhoHasLeftFirst) {
  World world(3);
  world.boards[1]->set_coordinates({"pp 0", "pp 1", "pp 2"});
  {
    BlockedScope waits(world.boards[1]->waits(), "tells where it is");
  }
  std::this_thread::sleep_for(milliseconds(200));
  world.clients[1]->leave();
  BlockedScope first(world.boards[0]->waits(), "recv_from(2)");
  BlockedScope second(world.boards[2]->waits(), "recv_from(0)");
  for (const int rank : {0, 2}) {
    const auto fault = world.fault_at(rank);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->describe().find(
                  "deadlock: global_rank 1 (pp 1) has left (its script has "
                  "finished), every other rank waits, and nothing has moved"),
              0u)
        << fault->text;
    EXPECT_NE(fault->text.find("global_rank 0: in recv_from(2) since"),
              std::string::npos);
  }
}

TEST(Liveness, RankThatComputesIsNoDeadlock) {
  World world(3);
  BlockedScope first(world.boards[0]->waits(), "a");
  BlockedScope second(world.boards[1]->waits(), "b");
  std::this_thread::sleep_for(milliseconds(1200));
  EXPECT_FALSE(world.boards[0]->fault());
  world.leave_all();
}

TEST(Liveness, ProgressAndUnsentMessagesAreNoDeadlock) {
  World world(2);
  BlockedScope first(world.boards[0]->waits(), "a");
  BlockedScope second(world.boards[1]->waits(), "b");
  for (int i = 0; i < 40; ++i) {
    world.boards[1]->waits().add_progress();
    std::this_thread::sleep_for(milliseconds(20));
  }
  world.boards[1]->waits().add_unsent(1);
  std::this_thread::sleep_for(milliseconds(1000));
  EXPECT_FALSE(world.boards[0]->fault());
  world.boards[1]->waits().add_unsent(-1);
  const auto fault = world.fault_at(0);  // nothing holds it back now
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, Kind::kDeadlock);
}

constexpr milliseconds kLonger{1500};  // than a deadlock needs

TEST(Liveness, WhatCountsAsProgressIsNoDeadlock) {
  World world(2);
  std::atomic<int64_t> finished = 0;  // of the backlog of a device
  world.boards[1]->waits().add_source([&] { return finished.load(); });
  BlockedScope first(world.boards[0]->waits(), "a");
  BlockedScope second(world.boards[1]->waits(), "b");
  const auto until = Clock::now() + kLonger;
  while (Clock::now() < until) {
    ++finished;
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_FALSE(world.boards[0]->fault());
  ASSERT_TRUE(world.fault_at(0)) << "it has stopped";
}

thread_local bool has_begun = false;

TEST(Liveness, ThreadOfAClientBeginsBeforeItTellsTheBoard) {
  std::atomic<bool> was_told = false;
  std::atomic<bool> had_begun = false;
  World world(2, /*connect=*/false);
  world.connect(0);
  world.boards[1]->subscribe([&] {
    had_begun = has_begun;
    was_told = true;
  });
  world.clients[1] = std::make_unique<LivenessClient>(
      "127.0.0.1", world.hub->port(), kSecret, 1, world.boards[1],
      LivenessClient::Options{.status_every = milliseconds(50),
                              .begin_thread = [] { has_begun = true; }});
  world.clients[0]->report_raised("a step", "no reason");
  EXPECT_TRUE(becomes_true([&] { return was_told.load(); }));
  EXPECT_TRUE(had_begun);
}

TEST(Liveness, RankThatIsMissedIsNamedByAllAndNotWhoMissesIt) {
  World world(3);
  world.boards[2]->set_coordinates({"pp 0", "pp 1", "pp 2"});
  world.clients[1]->leave();
  EXPECT_TRUE(becomes_true([&] { return world.boards[0]->has_left(1); }));
  EXPECT_THROW(fail_because_left(*world.boards[0], 1, "gate"), PeerFailure);
  world.clients[0]->close();
  const auto fault = world.fault_at(2);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->describe(),
            "global_rank 1 (pp 1) has left (its script has finished) while "
            "global_rank 0 waits for it in gate");
}

// The hub reaches both; only one of them can see that the other is gone.
TEST(Liveness, HostThatOneRankCannotReachIsNamedByAll) {
  World world(3);
  world.boards[0]->set_coordinates({"a", "b", "c"});
  world.boards[1]->report({.kind = Fault::Kind::kUnreachable,
                           .global_rank = 2,
                           .text = "seen by global_rank 1",
                           .is_found_here = true});
  for (const int rank : {0, 2}) {
    const auto fault = world.fault_at(rank);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->kind, Fault::Kind::kUnreachable);
    // A fault of this rank would be taken for its own exception.
    EXPECT_EQ(fault->global_rank, rank == 2 ? 1 : 2);
  }
  EXPECT_EQ(world.boards[0]->fault()->describe(),
            "global_rank 2 (c): its host cannot be reached: seen by "
            "global_rank 1");
}

// A hub that welcomes one rank and then says nothing: rank 0 is stopped.
class StoppedHub {
 public:
  StoppedHub()
      : listener_(listen_tcp(kLoopback)), thread_([this] { welcome(); }) {}
  ~StoppedHub() { thread_.join(); }
  int port() const { return listener_.port; }

 private:
  void welcome() {
    while (!(connection_ = accept_tcp(listener_.fd))) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    auto handshake = Handshake::listener(kSecret, kHubPurpose);
    std::string in;
    std::string bytes;
    while (!handshake.is_proven()) {
      read_available(connection_, in);
      in.erase(0, handshake.advance(in, bytes));
      write_available(connection_, bytes);
      std::this_thread::sleep_for(milliseconds(5));
    }
    LivenessFrame answer;
    answer.type = LivenessFrame::Type::kWelcome;
    bytes = encode_frame(answer);
    write_available(connection_, bytes);
  }

  const Listener listener_;
  OwnedFd connection_;
  std::thread thread_;
};

TEST(Liveness, StoppedHubIsReportedByARankThatWaits) {
  StoppedHub hub;
  auto board = std::make_shared<FaultBoard>(1);
  board->set_coordinates({"pp 0", "pp 1"});
  LivenessClient client(
      "127.0.0.1", hub.port(), kSecret, 1, board,
      {.status_every = milliseconds(50), .hang_after = milliseconds(300)});
  testing::internal::CaptureStderr();
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "it does not wait";
  testing::internal::CaptureStderr();
  {
    BlockedScope waits(board->waits(), "a gate");
    std::this_thread::sleep_for(milliseconds(600));
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("global_rank 0 (pp 0) HAS SAID NOTHING for"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("this rank waits in a gate"), std::string::npos);
}

TEST(Liveness, SilentHubIsAFaultAfterTwiceTheTime) {
  StoppedHub hub;
  auto board = std::make_shared<FaultBoard>(2);
  board->set_coordinates({"pp 0", "pp 1", "pp 2"});
  LivenessClient client("127.0.0.1", hub.port(), kSecret, 2, board,
                        {.status_every = milliseconds(50),
                         .hang_after = milliseconds(300),
                         .hang_raises = true});
  std::this_thread::sleep_for(milliseconds(900));
  EXPECT_FALSE(board->fault()) << "it does not wait";
  BlockedScope waits(board->waits(), "a gate");
  ASSERT_TRUE(becomes_true([&] { return board->fault().has_value(); }));
  EXPECT_EQ(board->fault()->kind, Kind::kStuck);
  EXPECT_EQ(board->fault()->describe().find(
                "global_rank 0 (pp 0) is stuck: it has said nothing for"),
            0U)
      << board->fault()->describe();
}

TEST(Liveness, HubThatLivesIsNotReported) {
  World world(2, false);
  world.connect(0);
  LivenessClient client(
      "127.0.0.1", world.hub->port(), kSecret, 1, world.boards[1],
      {.status_every = milliseconds(50), .hang_after = milliseconds(1500)});
  testing::internal::CaptureStderr();
  BlockedScope waits(world.boards[1]->waits(), "a gate");
  std::this_thread::sleep_for(seconds(3));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  client.leave();
  world.leave_all();
}

TEST(Liveness, LeavingOfTheRankThatOthersWaitedForIsNoDeadlock) {
  World world(2);
  {
    BlockedScope waits(world.boards[0]->waits(), "barrier");
    std::this_thread::sleep_for(milliseconds(800));
    world.clients[1]->leave();
    EXPECT_TRUE(becomes_true([&] { return world.boards[0]->has_left(1); }));
    std::this_thread::sleep_for(milliseconds(100));  // its message arrives
  }
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_FALSE(world.boards[0]->fault());
  world.leave_all();
}

TEST(Liveness, MissingRankIsNoDeadlock) {
  World world(2, false);
  world.connect(0);
  BlockedScope first(world.boards[0]->waits(), "a");
  std::this_thread::sleep_for(milliseconds(900));
  EXPECT_FALSE(world.boards[0]->fault());
  world.leave_all();
}

TEST(Liveness, RanksThatAreNoneAreRefused) {
  World world(2);
  auto board = std::make_shared<FaultBoard>(1);
  EXPECT_NE(error_of([&] {
              LivenessClient("127.0.0.1", world.hub->port(), kSecret, 7, board,
                             {.connect_timeout = seconds(5)});
            }).find("ranks are 0 to 1"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              LivenessClient("127.0.0.1", world.hub->port(), kSecret, 1, board,
                             {.connect_timeout = seconds(5)});
            }).find("another process has this rank"),
            std::string::npos);
  world.clients[1]->report_raised("", "still works");
  EXPECT_EQ(world.fault_at(0)->text, "still works");
}

TEST(Liveness, UnreachableHubIsAnError) {
  int port = 0;
  {
    const Listener closed = listen_tcp(kLoopback);
    port = closed.port;
  }
  auto board = std::make_shared<FaultBoard>(1);
  EXPECT_THROW(LivenessClient("127.0.0.1", port, kSecret, 1, board,
                              {.connect_timeout = milliseconds(500)}),
               Error);
}

TEST(Liveness, HubListensOnLoopbackOnlyWhenAsked) {
  const Listener loopback = listen_tcp(kLoopback);
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ASSERT_EQ(::getsockname(loopback.fd.get(),
                          reinterpret_cast<sockaddr*>(&address), &length),
            0);
  ASSERT_EQ(address.ss_family, AF_INET);
  EXPECT_EQ(reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr,
            htonl(INADDR_LOOPBACK));
}

TEST(ForkGuard, ForkedChildDoesNotHoldConnectionsOpen) {
  std::array<int, 2> ends;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()),
            0);
  OwnedFd ours(ends[0]);
  OwnedFd other(ends[1]);
  const ForkGuard guard;
  std::array<int, 2> until;
  ASSERT_EQ(::pipe(until.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(until[1]);
    char byte;
    (void)!::read(until[0], &byte, 1);  // lives until the parent is through
    ::_exit(guard.in_child() ? 0 : 1);
  }
  ours.reset();
  std::string buffer;
  EXPECT_TRUE(becomes_true(
      [&] { return read_available(other, buffer) == IoResult::kClosed; }));
  EXPECT_FALSE(guard.in_child());
  EXPECT_NO_THROW(guard.check("it"));
  ::close(until[0]);
  ::close(until[1]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(LivenessFrame, RoundTripInPieces) {
  LivenessFrame sent;
  sent.type = LivenessFrame::Type::kStatus;
  sent.global_rank = 3;
  sent.is_blocked = true;
  sent.blocked_ms = 1500;
  sent.progress = int64_t{1} << 40;
  sent.device_waits = true;
  sent.num_unsent = 2;
  sent.where = "pp 1";
  sent.text = "barrier";
  const std::string bytes = encode_frame(sent) + encode_frame(sent);
  std::string buffer;
  int num_frames = 0;
  for (const char byte : bytes) {
    buffer.push_back(byte);
    const auto got = take_frame(buffer);
    if (!got) continue;
    ++num_frames;
    EXPECT_EQ(got->type, sent.type);
    EXPECT_EQ(got->global_rank, 3);
    EXPECT_TRUE(got->is_blocked);
    EXPECT_TRUE(got->device_waits);
    EXPECT_EQ(got->progress, sent.progress);
    EXPECT_EQ(got->where, "pp 1");
    EXPECT_EQ(got->text, "barrier");
  }
  EXPECT_EQ(num_frames, 2);
  EXPECT_TRUE(buffer.empty());
}

TEST(LivenessFrame, LongTextIsCut) {
  LivenessFrame sent;
  sent.text.assign(10 * kMaxTextBytes, 'x');
  std::string bytes = encode_frame(sent);
  EXPECT_EQ(take_frame(bytes)->text.size(), kMaxTextBytes);
}

TEST(LivenessFrame, MutatedBytesNeverDoHarm) {
  LivenessFrame sent;
  sent.where = "where";
  sent.text = "text";
  const std::string right = encode_frame(sent);
  std::mt19937 random(3);
  int num_rejected = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = right;
    bytes[random() % bytes.size()] = static_cast<char>(random());
    try {
      take_frame(bytes);
    } catch (const Error&) {
      ++num_rejected;
    }
  }
  EXPECT_GT(num_rejected, 100);
}

}  // namespace
}  // namespace smp::health
