#include "csrc/comm/shared_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "csrc/comm/local_world.h"
#include "csrc/comm/mailbox.h"
#include "csrc/comm/shared_segment.h"
#include "csrc/comm/wire.h"
#include "csrc/common/check.h"
#include "tests/cpp/comm/expectations.h"
#include "tests/cpp/comm/run_ranks.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kRingBytes = 50'000;
constexpr int64_t kManyRings = 4'000'000;
constexpr int64_t kLargeRing = int64_t{8} << 30;

rlim_t size_of_process() {
  int64_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  return static_cast<rlim_t>(num_pages) * ::sysconf(_SC_PAGESIZE);
}

std::vector<int> peers_with(int self, const CommunicatorPtr& world,
                            SharedMemoryOptions options) {
  FaultBoard board(self);
  options.ring_bytes = kRingBytes;
  return connect_shared_memory(*world, board, options)->peers();
}

TEST(SharedMemory, RanksOfOneMachineShareIt) {
  run_ranks(3, [](int self, const CommunicatorPtr& world) {
    std::vector<int> others = {0, 1, 2};
    others.erase(others.begin() + self);
    EXPECT_EQ(peers_with(self, world, {.machine = "a"}), others);
  });
}

TEST(SharedMemory, RanksOfOtherMachinesDoNot) {
  run_ranks(4, [](int self, const CommunicatorPtr& world) {
    const std::string machine = self % 2 == 0 ? "even" : "odd";
    EXPECT_EQ(peers_with(self, world, {.machine = machine}),
              std::vector<int>{(self + 2) % 4});
  });
}

TEST(SharedMemory, RankThatDoesNotWantToIsLeftOutAndNamed) {
  testing::internal::CaptureStderr();
  run_ranks(3, [](int self, const CommunicatorPtr& world) {
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

// What rank 0 of two says while no memory can be shared.
std::string complaint(int64_t ring_bytes_of_rank_0) {
  testing::internal::CaptureStderr();
  run_ranks(2, [&](int self, const CommunicatorPtr& world) {
    FaultBoard board(self);
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
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
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
  run_ranks(2, [&](int self, const CommunicatorPtr& world) {
    FaultBoard board(self);
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
  const auto world = make_local_world(2);
  FaultBoard board(0);
  auto meeting = std::async(std::launch::async, [&] {
    EXPECT_THROW(connect_shared_memory(*world[0], board, {}), PeerFailure);
  });
  board.report({.kind = Fault::Kind::kDied, .global_rank = 1});
  EXPECT_EQ(meeting.wait_for(seconds(5)), std::future_status::ready);
}

TEST(SharedMemory, AbsentRankIsATimeout) {
  const auto world = make_local_world(2);
  FaultBoard board(0);
  const auto begin = Clock::now();
  EXPECT_THROW(
      connect_shared_memory(*world[0], board, {.timeout = milliseconds(300)}),
      Error);
  EXPECT_LT(Clock::now() - begin, seconds(5));
}

TEST(SharedSegment, IsOpenedOnlyByItsStamp) {
  const SegmentStamp stamp{{1, 2}, kRingBytes, 1};
  OwnedFd fd;
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
  OwnedFd fd;
  SharedSegment made;
  ASSERT_EQ(SharedSegment::make_file(stamp, fd, made), 0);
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
}

// Rank 0 of two; nobody reads what it sends.
struct Lonely {
  Lonely()
      : memory(make_local_shared_memory(2, kRingBytes)),
        world(make_local_world(2)),
        board(std::make_shared<FaultBoard>(0)),
        mailbox(world[0], board, memory[0]) {}

  void post_much() {
    Message message;
    message.tensors.push_back({at::zeros({kManyRings}), false, {}});
    mailbox.post(1, std::move(message));
  }

  std::vector<SharedMemoryPtr> memory;
  std::vector<CommunicatorPtr> world;
  std::shared_ptr<FaultBoard> board;
  Mailbox mailbox;
};

TEST(SharedMemoryLink, PostDoesNotWaitForTheReader) {
  Lonely rank;
  for (int i = 0; i < 3; ++i) rank.post_much();
  EXPECT_EQ(rank.mailbox.num_unsent(), 3);
  EXPECT_EQ(rank.board->waits().snapshot().num_unsent, 3);
  rank.mailbox.close(milliseconds(0));
}

TEST(SharedMemoryLink, CloseInTheMiddleOfAMessageKeepsItsTime) {
  Lonely rank;
  rank.post_much();
  const auto begin = Clock::now();
  rank.mailbox.close(milliseconds(200));
  EXPECT_GE(Clock::now() - begin, milliseconds(200));
  EXPECT_LT(Clock::now() - begin, seconds(3));
  EXPECT_EQ(rank.mailbox.num_unsent(), 0);
  EXPECT_EQ(rank.board->waits().snapshot().num_unsent, 0);
}

TEST(SharedMemoryLink, MessagesToADeadRankAreGivenUp) {
  Lonely rank;
  for (int i = 0; i < 3; ++i) rank.post_much();
  rank.board->report({.kind = Fault::Kind::kDied, .global_rank = 1});
  EXPECT_TRUE(becomes_true([&] { return rank.mailbox.num_unsent() == 0; }));
}

TEST(SharedMemoryLink, MessagesToARankThatLeftAreGivenUpLater) {
  Lonely rank;
  rank.post_much();
  rank.board->mark_left(1);
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(rank.mailbox.num_unsent(), 1);  // it may still read
  EXPECT_TRUE(becomes_true([&] { return rank.mailbox.num_unsent() == 0; }));
}

TEST(SharedMemoryLink, CorruptMessageBecomesAFaultThatNamesItsSource) {
  Lonely rank;
  auto peer = rank.memory[1]->take_peers().at(0);
  const std::vector<uint8_t> nonsense(1000, 0x5a);
  peer.to.write(nonsense.data(), nonsense.size());
  peer.to.publish();
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_NE(rank.board->fault()->text.find("message from global_rank 1"),
            std::string::npos);
}

TEST(SharedMemoryLink, LostMessageIsNoticed) {
  Lonely rank;
  auto peer = rank.memory[1]->take_peers().at(0);
  wire::Parts parts = wire::take_apart({});
  wire::set_sequence(parts.header.data(), 1);  // the first one is 0
  peer.to.write(parts.header.data(), parts.header.size());
  peer.to.publish();
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_NE(rank.board->fault()->text.find("expected message 0"),
            std::string::npos);
}

// ------------------------------------------------------------- two processes

#ifdef __SANITIZE_THREAD__
constexpr bool kMayFork = false;  // it cannot follow threads of a fork
#else
constexpr bool kMayFork = true;
#endif

// Sends back what comes until it is killed or told to end.
[[noreturn]] void echo(const SharedMemoryPtr& memory) {
  {
    auto board = std::make_shared<FaultBoard>(1);
    Mailbox mailbox(make_local_world(2)[1], board, memory);
    std::promise<void> end;
    mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
      if (message.fields[0] < 0) return end.set_value();
      mailbox.post(0, std::move(message));
    });
    end.get_future().wait();
    mailbox.set_handler(Channel::kPipeline, {});
  }
  ::_exit(0);
}

class TwoProcesses : public testing::Test {
 protected:
  void SetUp() override {
    if (!kMayFork) GTEST_SKIP() << "no fork under this sanitizer";
    const auto memory = make_local_shared_memory(2, kRingBytes);
    child_ = ::fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) echo(memory[1]);
    mailbox_ =
        std::make_unique<Mailbox>(make_local_world(2)[0], board_, memory[0]);
    mailbox_->set_handler(Channel::kPipeline, [this](Message&& message) {
      last_ = std::move(message);
      num_received_.fetch_add(1);
    });
  }

  void TearDown() override {
    mailbox_.reset();
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }

  void post(int64_t number, const at::Tensor& tensor) {
    Message message;
    message.channel = Channel::kPipeline;
    message.fields[0] = number;
    message.tensors.push_back({tensor, false, {}});
    mailbox_->post(1, std::move(message));
  }

  pid_t child_ = -1;
  std::shared_ptr<FaultBoard> board_ = std::make_shared<FaultBoard>(0);
  std::unique_ptr<Mailbox> mailbox_;
  Message last_;  // read it after `num_received_`
  std::atomic<int> num_received_{0};
};

TEST_F(TwoProcesses, MessagesComeBackUnchanged) {
  int num_sent = 0;
  for (const int64_t size : {1, 1000, 20'000, 1'000'000}) {
    const at::Tensor sent = at::arange(size);
    post(size, sent);
    ++num_sent;
    ASSERT_TRUE(becomes_true([&] { return num_received_ == num_sent; }));
    EXPECT_EQ(last_.fields[0], size);
    EXPECT_TRUE(at::equal(last_.tensors[0].data, sent));
  }
  post(-1, at::Tensor());
  int status = -1;
  EXPECT_EQ(::waitpid(std::exchange(child_, -1), &status, 0) > 0, true);
  EXPECT_EQ(status, 0);
}

TEST_F(TwoProcesses, KilledPeerInTheMiddleOfAMessageHoldsUpNothing) {
  for (int i = 0; i < 4; ++i) post(i, at::zeros({kManyRings}));
  std::this_thread::sleep_for(milliseconds(2));
  ::kill(child_, SIGKILL);
  ::waitpid(std::exchange(child_, -1), nullptr, 0);
  EXPECT_GT(mailbox_->num_unsent(), 0);
  board_->report({.kind = Fault::Kind::kDied, .global_rank = 1});
  EXPECT_TRUE(becomes_true([&] { return mailbox_->num_unsent() == 0; }));
  const auto begin = Clock::now();
  mailbox_->close();
  EXPECT_LT(Clock::now() - begin, seconds(2));
}

}  // namespace
}  // namespace smp::comm
