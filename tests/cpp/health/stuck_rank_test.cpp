#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/health/file_meter.h"
#include "csrc/health/liveness.h"
#include "csrc/health/process_words.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;

// Rank 1 loops and rank 0 waits for it.
struct StuckWorld {
  StuckWorld()
      : hub(2, kLoopback, kSecret,
            {.hang_after = milliseconds(600), .hang_raises = true}) {
    for (int rank = 0; rank < 2; ++rank) {
      boards.push_back(std::make_shared<FaultBoard>(rank));
      boards[rank]->set_coordinates({"pp 0", "pp 1"});
      clients.push_back(std::make_unique<LivenessClient>(
          "127.0.0.1", hub.port(), kSecret, rank, boards[rank],
          LivenessClient::Options{
              .status_every = milliseconds(50),
              .interrupt_script = [this] { ++num_interrupted; },
              .exit_after = milliseconds(1500),
              .exit_process = [this] { ++num_exits; }}));
    }
  }

  std::atomic<int> num_interrupted = 0;
  std::atomic<int> num_exits = 0;
  LivenessHub hub;
  std::vector<std::shared_ptr<FaultBoard>> boards;
  std::vector<std::unique_ptr<LivenessClient>> clients;
};

TEST(StuckRank, IsAFaultOfAllAndIsEnded) {
  StuckWorld world;
  world.boards[1]->waits().set_activity("module 'h.1', microbatch 2");
  BlockedScope waits(world.boards[0]->waits(), "step call 3");
  for (const auto& board : world.boards) {
    ASSERT_TRUE(becomes_true([&] { return board->fault().has_value(); }));
    const Fault fault = *board->fault();
    EXPECT_EQ(fault.kind, Fault::Kind::kStuck);
    EXPECT_EQ(fault.global_rank, 1);
    EXPECT_EQ(fault.stuck, std::vector<int>{1});
    EXPECT_EQ(fault.describe().find(
                  "global_rank 1 (pp 1) is stuck: it has neither waited nor "
                  "moved for"),
              0U)
        << fault.describe();
    EXPECT_NE(fault.text.find("module 'h.1', microbatch 2"), std::string::npos);
  }
  world.hub.close();  // rank 0 has ended with its error
  EXPECT_TRUE(becomes_true([&] { return world.num_interrupted == 1; }));
  EXPECT_EQ(world.num_exits, 0) << "the script has time to end";
  EXPECT_TRUE(becomes_true([&] { return world.num_exits > 0; }));
  EXPECT_EQ(world.num_interrupted, 1) << "rank 0 is not stuck";
}

TEST(StuckRank, ThatMovesAfterTheFaultEndsByItself) {
  StuckWorld world;
  BlockedScope waits(world.boards[0]->waits(), "step call 3");
  ASSERT_TRUE(
      becomes_true([&] { return world.boards[1]->fault().has_value(); }));
  for (int i = 0; i < 40; ++i) {
    world.boards[1]->waits().add_progress();
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_EQ(world.num_interrupted, 0);
  EXPECT_EQ(world.num_exits, 0);
}

TEST(StuckRank, OtherWordsForTheWorkAreProgressWhereNobodyWaits) {
  WaitRegistry registry;
  const int64_t before = registry.snapshot().progress;
  registry.set_activity("microbatch 0");
  registry.set_activity("microbatch 0");
  EXPECT_EQ(registry.snapshot().progress, before + 1);
  BlockedScope waits(registry, "gate");
  registry.set_activity("microbatch 1");
  EXPECT_EQ(registry.snapshot().progress, before + 1) << "or deadlocks hide";
}

TEST(BlockedScope, WaitThatGoesOnIsAsOldAsItsFirstBegin) {
  WaitRegistry registry;
  BlockedScope scope(registry);
  scope.update(true, "step call 3", /*goes_on=*/true);
  std::this_thread::sleep_for(milliseconds(60));
  scope.update(false, {});
  EXPECT_FALSE(registry.snapshot().is_blocked);
  scope.update(true, "step call 3", /*goes_on=*/true);
  EXPECT_GE(registry.snapshot().blocked_for, milliseconds(50));
  EXPECT_EQ(registry.snapshot().progress, 1) << "or it were a deadlock";
  scope.update(false, {});
  const auto before = std::chrono::steady_clock::now();
  scope.update(true, "step call 3");
  const auto blocked_for = registry.snapshot().blocked_for;
  EXPECT_LE(blocked_for, std::chrono::steady_clock::now() - before);
}

TEST(FileMeter, TransfersCountAndTalkDoesNot) {
  FileMeter meter;
  EXPECT_EQ(meter.read(), 0);
  const int fd = ::memfd_create("file", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  std::string bytes(1000, 'x');
  EXPECT_EQ(::write(fd, bytes.data(), bytes.size()), 1000);
  EXPECT_EQ(meter.read(), 0) << "a line of a log";
  bytes.resize(200'000);
  EXPECT_EQ(::write(fd, bytes.data(), bytes.size()), 200'000);
  const int64_t seen = meter.read();
  EXPECT_GE(seen, 200'000);
  meter.leave_out(
      [&] { EXPECT_EQ(::write(fd, bytes.data(), bytes.size()), 200'000); });
  EXPECT_EQ(meter.read(), seen) << "stacks that were asked for";
  ::close(fd);
}

TEST(ProcessWords, StoppedProcessIsNamedAndHowItGoesOn) {
  const pid_t child = ::fork();
  if (child == 0) {
    while (true) ::pause();
  }
  ASSERT_EQ(::kill(child, SIGSTOP), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  const std::string number = std::to_string(child);
  EXPECT_EQ(process_words(child), "process " + number +
                                      " is stopped; kill -CONT " + number +
                                      " lets it go on");
  EXPECT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(process_words(child), "");
  EXPECT_FALSE(process_space().empty());
}

}  // namespace
}  // namespace smp::health
