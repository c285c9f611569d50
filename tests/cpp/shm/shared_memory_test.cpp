#include "csrc/shm/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <string>

#include "csrc/common/check.h"
#include "csrc/shm/shared_segment.h"
#include "tests/cpp/comm/local_world.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kRingBytes = 50'000;
constexpr int64_t kLargeRing = int64_t{8} << 30;

rlim_t size_of_process() {
  int64_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  return static_cast<rlim_t>(num_pages) * ::sysconf(_SC_PAGESIZE);
}

std::vector<int> peers_with(int self, const comm::CommunicatorPtr& world,
                            SharedMemoryOptions options) {
  health::FaultBoard board(self);
  options.ring_bytes = kRingBytes;
  return connect_shared_memory(*world, board, options)->peers();
}

TEST(SharedMemory, RanksOfOneMachineShareIt) {
  comm::run_ranks(3, [](int self, const comm::CommunicatorPtr& world) {
    std::vector<int> others = {0, 1, 2};
    others.erase(others.begin() + self);
    EXPECT_EQ(peers_with(self, world, {.machine = "a"}), others);
  });
}

TEST(SharedMemory, RanksOfOtherMachinesDoNot) {
  comm::run_ranks(4, [](int self, const comm::CommunicatorPtr& world) {
    const std::string machine = self % 2 == 0 ? "even" : "odd";
    EXPECT_EQ(peers_with(self, world, {.machine = machine}),
              std::vector<int>{(self + 2) % 4});
  });
}

TEST(SharedMemory, RankThatDoesNotWantToIsLeftOutAndNamed) {
  testing::internal::CaptureStderr();
  comm::run_ranks(3, [](int self, const comm::CommunicatorPtr& world) {
    const std::vector<int> peers =
        peers_with(self, world, {.enabled = self != 1, .machine = "a"});
    EXPECT_EQ(peers, self == 1 ? std::vector<int>{} : std::vector{2 - self});
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("global_rank 1 has SMP_SHM=0"), std::string::npos) << log;
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

// A limit of this process, for the time of a test.
class Limit {
 public:
  Limit(int resource, rlim_t value) : resource_(resource) {
    ::getrlimit(resource_, &before_);
    rlimit limit = before_;
    limit.rlim_cur = value;
    ::setrlimit(resource_, &limit);
  }
  ~Limit() { ::setrlimit(resource_, &before_); }

 private:
  const int resource_;
  rlimit before_{};
};

// Returns what rank 0 of two prints while no memory can be shared.
std::string complaint(int64_t ring_bytes_of_rank_0) {
  testing::internal::CaptureStderr();
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    health::FaultBoard board(self);
    const int64_t ring_bytes = self == 0 ? ring_bytes_of_rank_0 : kRingBytes;
    const auto memory =
        connect_shared_memory(*world, board, {.ring_bytes = ring_bytes});
    EXPECT_TRUE(memory->peers().empty());
  });
  return testing::internal::GetCapturedStderr();
}

TEST(SharedMemory, MemoryThatCannotBeMadeIsNoErrorAndSaidOnce) {
  std::string log;
  {
    const Limit limit(RLIMIT_AS, size_of_process() + kLargeRing / 2);
    log = complaint(kLargeRing);
  }
  EXPECT_NE(log.find("over local instead of shared memory"), std::string::npos)
      << log;
  EXPECT_NE(log.find("global_rank 0 cannot make shared memory: "),
            std::string::npos)
      << log;
}

TEST(SharedMemory, MemoryThatCannotBeOpenedIsNoErrorAndSaidOnce) {
  std::string log;
  {
    const Limit limit(RLIMIT_AS, size_of_process() + kLargeRing * 3 / 2);
    log = complaint(kLargeRing);
  }
  EXPECT_NE(log.find("global_rank 1 cannot open the memory of global_rank 0: "),
            std::string::npos)
      << log;
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST(SharedMemory, NothingIsSaidWhenNobodyWantsTo) {
  testing::internal::CaptureStderr();
  comm::run_ranks(2, [](int self, const comm::CommunicatorPtr& world) {
    EXPECT_TRUE(peers_with(self, world, {.enabled = false}).empty());
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(SharedMemory, KeepsNoDescriptor) {
  auto num_open = [] {
    namespace fs = std::filesystem;
    return std::distance(fs::directory_iterator("/proc/self/fd"),
                         fs::directory_iterator());
  };
  const auto before = num_open();
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    health::FaultBoard board(self);
    const auto memory = connect_shared_memory(*world, board, {});
    EXPECT_EQ(memory->peers().size(), 1u);
    world->barrier()->wait(seconds(10));
    if (self == 0) {  // counting opens one
      EXPECT_EQ(num_open(), before);
    }
    world->barrier()->wait(seconds(10));
  });
}

TEST(SharedMemory, ServesOneMailbox) {
  const auto memory = make_local_shared_memory(2, kRingBytes);
  EXPECT_EQ(memory[0]->take_peers().size(), 1u);
  EXPECT_THROW(memory[0]->take_peers(), Error);
}

TEST(SharedMemory, FaultEndsTheMeeting) {
  const auto world = comm::make_local_world(2);
  health::FaultBoard board(0);
  auto meeting = std::async(std::launch::async, [&] {
    EXPECT_THROW(connect_shared_memory(*world[0], board, {}), PeerFailure);
  });
  board.report({.kind = health::Fault::Kind::kDied, .global_rank = 1});
  EXPECT_EQ(meeting.wait_for(kPatience), std::future_status::ready);
}

TEST(SharedMemory, AbsentRankIsATimeout) {
  const auto world = comm::make_local_world(2);
  health::FaultBoard board(0);
  EXPECT_THROW(
      connect_shared_memory(*world[0], board, {.timeout = milliseconds(300)}),
      Error);
}

TEST(SharedSegment, IsOpenedOnlyByItsStamp) {
  const SegmentStamp stamp{{1, 2}, kRingBytes, 1};
  health::OwnedFd fd;
  SharedSegment made;
  ASSERT_EQ(SharedSegment::make_file(stamp, fd, made), 0);
  SharedSegment opened;
  ASSERT_EQ(SharedSegment::open(::getpid(), fd.get(), stamp, opened), 0);
  made.ring(0).data[kRingBytes - 1] = 7;
  EXPECT_EQ(opened.ring(0).data[kRingBytes - 1], 7);

  SegmentStamp other = stamp;
  other.token[1] = 3;
  EXPECT_EQ(SharedSegment::open(::getpid(), fd.get(), other, opened), ESTALE);
  other = stamp;
  other.ring_bytes = 2 * kRingBytes;
  EXPECT_EQ(SharedSegment::open(::getpid(), fd.get(), other, opened), ESTALE);
  const int number = fd.get();
  fd.reset();
  EXPECT_EQ(SharedSegment::open(::getpid(), number, stamp, opened), ENOENT);
}

TEST(SharedSegment, CannotBeCutOff) {
  const SegmentStamp stamp{{1, 2}, kRingBytes, 1};
  health::OwnedFd fd;
  SharedSegment made;
  ASSERT_EQ(SharedSegment::make_file(stamp, fd, made), 0);
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
}

}  // namespace
}  // namespace smp::shm
