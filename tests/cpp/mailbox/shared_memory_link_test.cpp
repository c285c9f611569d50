#include "csrc/mailbox/shared_memory_link.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>
#include <utility>

#include "csrc/mailbox/mailbox.h"
#include "csrc/mailbox/wire.h"
#include "tests/cpp/comm/local_world.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kRingBytes = 50'000;
constexpr int64_t kManyRings = 4'000'000;

// Rank 0 of two, whose messages are never read.
struct Lonely {
  Lonely()
      : memory(shm::make_local_shared_memory(2, kRingBytes)),
        world(comm::make_local_world(2)),
        board(std::make_shared<health::FaultBoard>(0)),
        mailbox(world[0], board, memory[0]) {}

  void post_much() {
    Message message;
    message.tensors.push_back({at::zeros({kManyRings}), false, {}});
    mailbox.post(1, std::move(message));
  }

  std::vector<shm::SharedMemoryPtr> memory;
  std::vector<comm::CommunicatorPtr> world;
  std::shared_ptr<health::FaultBoard> board;
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
  EXPECT_EQ(rank.mailbox.num_unsent(), 0);
  EXPECT_EQ(rank.board->waits().snapshot().num_unsent, 0);
}

TEST(SharedMemoryLink, MessagesToADeadRankAreGivenUp) {
  Lonely rank;
  for (int i = 0; i < 3; ++i) rank.post_much();
  rank.board->report({.kind = health::Fault::Kind::kDied, .global_rank = 1});
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

// Orders to `echo`, sent instead of a message's number.
constexpr int64_t kEnd = -1;
constexpr int64_t kStop = -2;

Message empty_message() {
  Message message;
  message.channel = Channel::kPipeline;
  return message;
}

// Sends back what comes until it is killed or told to end. Told to stop, it
// sends a message without tensors and then what has come, of which a ring takes
// the first part, and none of its threads runs any more.
[[noreturn]] void echo(const shm::SharedMemoryPtr& memory) {
  {
    auto board = std::make_shared<health::FaultBoard>(1);
    Mailbox mailbox(comm::make_local_world(2)[1], board, memory);
    std::promise<void> end;
    mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
      const int64_t number = message.fields[0];
      if (number == kEnd) return end.set_value();
      if (number == kStop) mailbox.post(0, empty_message());
      mailbox.post(0, std::move(message));
      if (number == kStop) ::raise(SIGSTOP);
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
    const auto memory = shm::make_local_shared_memory(2, kRingBytes);
    child_ = ::fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) echo(memory[1]);
    mailbox_ = std::make_unique<Mailbox>(comm::make_local_world(2)[0], board_,
                                         memory[0]);
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
    Message message = empty_message();
    message.fields[0] = number;
    message.tensors.push_back({tensor, false, {}});
    mailbox_->post(1, std::move(message));
  }

  bool child_stops() {
    return becomes_true([&] {
      int status = 0;
      return ::waitpid(child_, &status, WUNTRACED | WNOHANG) == child_ &&
             WIFSTOPPED(status);
    });
  }

  pid_t child_ = -1;
  std::shared_ptr<health::FaultBoard> board_ =
      std::make_shared<health::FaultBoard>(0);
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
  post(kEnd, at::Tensor());
  int status = -1;
  EXPECT_EQ(::waitpid(std::exchange(child_, -1), &status, 0) > 0, true);
  EXPECT_EQ(status, 0);
}

// When the peer dies, each ring holds the first part of a long message, one in
// each direction.
TEST_F(TwoProcesses, KilledPeerInTheMiddleOfAMessageHoldsUpNothing) {
  std::promise<void> death;
  mailbox_->set_handler(
      Channel::kPipeline,
      [this, is_dead = death.get_future().share()](Message&&) {
        num_received_.fetch_add(1);
        is_dead.wait();  // meanwhile nobody reads the message that follows
      });
  post(kStop, at::zeros({kManyRings}));
  for (int i = 0; i < 3; ++i) post(i, at::zeros({kManyRings}));
  ASSERT_TRUE(child_stops());
  ASSERT_TRUE(becomes_true(
      [&] { return num_received_ == 1 && mailbox_->num_unsent() == 3; }));
  ::kill(child_, SIGKILL);
  ::waitpid(std::exchange(child_, -1), nullptr, 0);
  death.set_value();
  EXPECT_EQ(mailbox_->num_unsent(), 3) << "nobody has said that it is dead";
  board_->report({.kind = health::Fault::Kind::kDied, .global_rank = 1});
  EXPECT_TRUE(becomes_true([&] { return mailbox_->num_unsent() == 0; }));
  mailbox_->close(std::chrono::hours(1));
  EXPECT_EQ(num_received_, 1) << "a part of a message was taken for one";
}

}  // namespace
}  // namespace smp::mailbox
