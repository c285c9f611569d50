#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "csrc/health/collective_log.h"
#include "csrc/health/liveness.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/raw_rank.h"

// Tests that the hub's work for many ranks grows with their number, not with
// its square.

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Type = LivenessFrame::Type;

class Job {
 public:
  explicit Job(int size, int num_there = -1)
      : hub(size, kLoopback, kSecret, {}) {
    const int num = num_there < 0 ? size : num_there;
    for (int rank = 0; rank < num; ++rank) {
      ranks.push_back(std::make_unique<RawRank>(hub.port(), rank));
    }
    for (auto& rank : ranks) EXPECT_TRUE(rank->hears(Type::kWelcome));
  }

  LivenessHub hub;
  std::vector<std::unique_ptr<RawRank>> ranks;
};

std::vector<int> all_of(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(HubScale, GoodbyesOfAllAreFewMessagesToEach) {
  constexpr int kSize = 64;
  Job job(kSize);
  for (auto& rank : job.ranks) rank->say(Type::kLeft);
  int num_messages = 0;
  for (auto& rank : job.ranks) {
    EXPECT_TRUE(
        becomes_true([&] { return rank->told_left() == all_of(kSize); }));
    num_messages += rank->num_heard(Type::kLeftRanks);
  }
  EXPECT_GE(num_messages, kSize);
  EXPECT_LT(num_messages, 10 * kSize) << "each with each: " << kSize * 63;
}

TEST(HubScale, WhoStaysHearsOfEachWhoLeaves) {
  Job job(12);
  for (int rank = 0; rank < 10; ++rank) {
    job.ranks[rank]->say(Type::kLeft);
    std::this_thread::sleep_for(milliseconds(20));
  }
  for (const int rank : {10, 11}) {
    EXPECT_TRUE(becomes_true(
        [&] { return job.ranks[rank]->told_left() == all_of(10); }));
    EXPECT_LE(job.ranks[rank]->num_heard(Type::kLeftRanks), 6);
  }
  EXPECT_EQ(job.ranks[0]->num_heard(Type::kLeftRanks), 0)
      << "it has left, and needs to know of nobody before all have";
  job.ranks[10]->say(Type::kLeft);
  job.ranks[11]->say(Type::kLeft);
  for (auto& rank : job.ranks) {
    EXPECT_TRUE(becomes_true([&] { return rank->told_left() == all_of(12); }));
  }
}

TEST(HubScale, WhoVanishesWhileOthersLeaveIsAFault) {
  Job job(6);
  for (int rank = 0; rank < 4; ++rank) job.ranks[rank]->say(Type::kLeft);
  job.ranks[4]->end();
  for (const int rank : {0, 3, 5}) {
    ASSERT_TRUE(job.ranks[rank]->hears(Type::kDied));
    for (const LivenessFrame& frame : job.ranks[rank]->heard()) {
      EXPECT_TRUE(frame.type != Type::kDied || frame.global_rank == 4);
    }
  }
  EXPECT_LT(job.ranks[0]->told_left().size(), 6u);
}

TEST(HubScale, LateComerHearsOfAllWhoHaveLeftInOneMessage) {
  Job job(9, /*num_there=*/8);
  for (auto& rank : job.ranks) rank->say(Type::kLeft);
  std::this_thread::sleep_for(milliseconds(100));
  RawRank late(job.hub.port(), 8);
  ASSERT_TRUE(late.hears(Type::kLeftRanks));
  EXPECT_EQ(late.told_left(), all_of(8));
  EXPECT_EQ(late.num_heard(Type::kLeftRanks), 1);
}

// After a failure all ranks end, one after the other.
TEST(HubScale, OnlyTheFirstFaultIsTold) {
  constexpr int kSize = 20;
  Job job(kSize);
  job.ranks[3]->end();
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_TRUE(rank == 3 || job.ranks[rank]->hears(Type::kDied));
  }
  for (int rank = 4; rank < kSize; ++rank) job.ranks[rank]->end();
  std::this_thread::sleep_for(milliseconds(600));
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(job.ranks[rank]->num_heard(Type::kDied), 1);
    EXPECT_EQ(job.ranks[rank]->heard().back().global_rank, 3);
  }
}

TEST(HubScale, SaysWhoHasLeftBeforeACollective) {
  Job job(3);
  CollectiveLog log;
  CollectiveId first{.group = 5, .signature = 9, .ranks = {0, 1, 2}};
  log.enter(first);
  LivenessFrame goodbye;
  goodbye.type = Type::kLeft;
  goodbye.collectives = log.state(std::nullopt).encode();
  job.ranks[1]->say(goodbye);
  ASSERT_TRUE(job.ranks[0]->hears(Type::kLeftRanks));
  CollectiveId second = first;
  log.enter(second);
  for (const CollectiveId& asked : {first, second}) {
    LivenessFrame question;
    question.type = Type::kLeftBeforeAsked;
    question.collectives = log.state(asked).encode();
    job.ranks[0]->say(question);
  }
  ASSERT_TRUE(job.ranks[0]->hears(Type::kLeftBefore));
  EXPECT_EQ(job.ranks[0]->num_heard(Type::kLeftBefore), 1);
  const LivenessFrame& answer = job.ranks[0]->heard().back();
  EXPECT_EQ(answer.progress, 1);
  const auto about = CollectiveLog::State::decode(answer.collectives);
  ASSERT_TRUE(about.waits_for);
  EXPECT_EQ(about.waits_for->group, 5u);
  EXPECT_EQ(about.waits_for->sequence, 2);
}

// Seconds that the thread of the hub has computed.
double hub_seconds() {
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (name != "smp-hub") continue;
    double nanoseconds = 0;
    std::ifstream(task.path() / "schedstat") >> nanoseconds;
    return nanoseconds / 1e9;
  }
  ADD_FAILURE() << "no hub";
  return 0;
}

// Returns the hub's seconds for answers to one connection, one by one.
double seconds_for_answers(int num_idle) {
  Job job(num_idle);
  RawRank refused(job.hub.port(), 1 << 20);
  EXPECT_TRUE(refused.hears(Type::kRefused));
  const double before = hub_seconds();
  for (int i = 2; i < 400; ++i) {
    refused.say(Type::kHello);
    EXPECT_TRUE(refused.hears(Type::kRefused, i));
  }
  return hub_seconds() - before;
}

TEST(HubScale, AnAnswerTakesNoLongerWithManyRanksThere) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  constexpr int kMany = 1000;
  if (limit.rlim_max < 3 * kMany) {
    GTEST_SKIP() << "needs " << 3 * kMany << " descriptors";
  }
  const rlimit before = limit;
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, 3 * kMany);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  const double with_few = seconds_for_answers(4);
  const double with_many = seconds_for_answers(kMany);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_LT(with_many, 3 * with_few + 0.005);
}

}  // namespace
}  // namespace smp::health
