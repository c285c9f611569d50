#include "csrc/mailbox/mailbox.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/mailbox/wire.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/socket_world.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Rank {
  Rank(int global_rank, comm::CommunicatorPtr world,
       const shm::SharedMemoryPtr& memory = nullptr,
       std::shared_ptr<comm::PeerSockets> sockets = nullptr)
      : board(std::make_shared<health::FaultBoard>(global_rank)),
        mailbox(std::move(world), board, memory, {}, std::move(sockets)) {}

  std::shared_ptr<health::FaultBoard> board;
  Mailbox mailbox;
};

Message numbered(int64_t number, Channel channel = Channel::kPipeline) {
  Message message;
  message.channel = channel;
  message.fields[0] = number;
  return message;
}

// Collects what arrives on a channel.
class Inbox {
 public:
  Inbox(Mailbox& mailbox, Channel channel)
      : mailbox_(mailbox), channel_(channel) {
    mailbox.set_handler(channel, [this](Message&& message) {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
      changed_.notify_all();
    });
  }
  ~Inbox() { mailbox_.set_handler(channel_, {}); }

  std::vector<Message> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    const bool in_time = changed_.wait_for(
        lock, seconds(20), [&] { return messages_.size() >= count; });
    EXPECT_TRUE(in_time) << messages_.size() << " of " << count;
    return messages_;
  }

 private:
  Mailbox& mailbox_;
  const Channel channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
};

enum class Transport {
  kCommunicator,
  kSockets,
  kMemory,  // mapped once, so that the thread sanitizer follows
  kFile,    // mapped by each rank, as by processes
};

class MailboxOver : public testing::TestWithParam<Transport> {
 protected:
  // So small that many messages do not fit, and no power of two.
  static constexpr int64_t kRingBytes = 50'000;

  static bool is_shared() {
    return GetParam() == Transport::kMemory || GetParam() == Transport::kFile;
  }

  static void run(int size, const std::function<void(int, Rank&)>& body) {
    std::vector<shm::SharedMemoryPtr> memories(size);
    if (GetParam() == Transport::kMemory) {
      memories = shm::make_local_shared_memory(size, kRingBytes);
    }
    std::vector<std::shared_ptr<comm::PeerSockets>> sockets(size);
    if (GetParam() == Transport::kSockets) {
      sockets = comm::make_socket_world(size);
    }
    comm::run_ranks(size, [&](int self, const comm::CommunicatorPtr& world) {
      if (GetParam() == Transport::kFile) {
        health::FaultBoard board(self);
        memories[self] = shm::connect_shared_memory(*world, board,
                                                    {.ring_bytes = kRingBytes});
        ASSERT_EQ(memories[self]->peers().size(), size - 1u);
      }
      Rank rank(self, world, std::exchange(memories[self], nullptr),
                sockets[self]);
      body(self, rank);
    });
  }
};

std::string name_of(const testing::TestParamInfo<Transport>& info) {
  if (info.param == Transport::kCommunicator) return "Communicator";
  if (info.param == Transport::kSockets) return "Sockets";
  return info.param == Transport::kMemory ? "Memory" : "File";
}

INSTANTIATE_TEST_SUITE_P(Transports, MailboxOver,
                         testing::Values(Transport::kCommunicator,
                                         Transport::kSockets,
                                         Transport::kMemory, Transport::kFile),
                         name_of);

TEST_P(MailboxOver, MessagesOfOneSenderArriveInOrderWhateverTheirSize) {
  constexpr int kNumMessages = 60;
  run(3, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    for (int i = 0; i < kNumMessages; ++i) {
      for (int dst = 0; dst < 3; ++dst) {
        Message message = numbered(i);
        message.bytes.assign(i % 3 == 0 ? 30'000 : 10, 'a');
        const int64_t size = i % 2 == 0 ? 20'000 : 2;
        message.tensors.push_back({at::full({size}, i + self), false, {}});
        rank.mailbox.post(dst, std::move(message));
      }
    }
    const auto messages = inbox.wait_for(3 * kNumMessages);
    std::vector<int> next(3, 0);
    for (const Message& message : messages) {
      const int source = message.source_rank;
      EXPECT_EQ(message.fields[0], next[source]++);
      const double value = static_cast<double>(message.fields[0]) + source;
      EXPECT_EQ(message.tensors[0].data[0].item<double>(), value);
      EXPECT_EQ(message.tensors[0].data[-1].item<double>(), value);
    }
    EXPECT_FALSE(rank.board->fault());
  });
}

TEST_P(MailboxOver, ManyThreadsMayPost) {
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          Message message = numbered(i);
          message.tensors.push_back({at::full({10'000}, i), false, {}});
          rank.mailbox.post(1 - self, std::move(message));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Message& message : inbox.wait_for(200)) {
      EXPECT_EQ(message.tensors[0].data[9999].item<int64_t>(),
                message.fields[0]);
    }
  });
}

TEST_P(MailboxOver, ChannelKeepsMessagesUntilItHasAHandler) {
  run(2, [](int self, Rank& rank) {
    Inbox order(rank.mailbox, Channel::kOrder);
    for (int i = 0; i < 3; ++i) rank.mailbox.post(1 - self, numbered(i));
    rank.mailbox.post(1 - self, numbered(0, Channel::kOrder));
    order.wait_for(1);  // sent last, so the others are here
    Inbox pipeline(rank.mailbox, Channel::kPipeline);
    const auto messages = pipeline.wait_for(3);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(messages[i].fields[0], i);
  });
}

TEST(Mailbox, SelfMessageArrivesOnAnotherThread) {
  Rank rank(0, comm::make_local_world(1)[0]);
  std::promise<std::thread::id> arrived;
  rank.mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
    EXPECT_EQ(message.source_rank, 0);
    arrived.set_value(std::this_thread::get_id());
  });
  rank.mailbox.post(0, numbered(1));
  EXPECT_NE(arrived.get_future().get(), std::this_thread::get_id());
}

TEST_P(MailboxOver, HandlerMayPost) {
  run(2, [](int self, Rank& rank) {
    std::promise<void> done;
    rank.mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
      const int64_t number = message.fields[0];
      if (number < 40) rank.mailbox.post(1 - self, numbered(number + 1));
      if (number >= 39) done.set_value();
    });
    if (self == 0) rank.mailbox.post(1, numbered(0));
    ASSERT_EQ(done.get_future().wait_for(seconds(20)),
              std::future_status::ready);
    rank.mailbox.set_handler(Channel::kPipeline, {});
  });
}

TEST_P(MailboxOver, StatsCountWhatIsOnTheWire) {
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    Message message = numbered(0);
    message.tensors.push_back({at::zeros({100'000}), false, {}});
    const int64_t num_bytes = GetParam() == Transport::kCommunicator
                                  ? wire::kPacketBytes + 400'000
                                  : wire::take_apart(message).num_bytes();
    rank.mailbox.post(1 - self, std::move(message));
    inbox.wait_for(1);
    const Mailbox::Stats stats = rank.mailbox.stats();
    EXPECT_EQ(stats.messages_sent, 1);
    EXPECT_EQ(stats.messages_received, 1);
    EXPECT_EQ(stats.bytes_sent, num_bytes);
    EXPECT_EQ(stats.bytes_received, num_bytes);
    EXPECT_EQ(stats.shared_memory.bytes_sent, is_shared() ? num_bytes : 0);
    EXPECT_EQ(stats.shared_memory.messages_received, is_shared() ? 1 : 0);
    EXPECT_EQ(rank.mailbox.progress(), 2);
    EXPECT_TRUE(becomes_true([&] { return rank.mailbox.num_unsent() == 0; }));
    EXPECT_EQ(rank.board->waits().snapshot().num_unsent, 0);
  });
}

TEST_P(MailboxOver, TensorsAreFreedOnceSent) {
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    const at::Tensor sent = at::full({100'000}, 1.5);
    Message message = numbered(0);
    message.tensors.push_back({sent, false, {}});
    rank.mailbox.post(1 - self, std::move(message));
    const auto messages = inbox.wait_for(1);
    EXPECT_NE(messages[0].tensors[0].data.const_data_ptr(),
              sent.const_data_ptr());
    EXPECT_TRUE(becomes_true([&] { return sent.storage().use_count() == 1; }));
  });
}

TEST_P(MailboxOver, CallerMayWriteToATensorOnceItIsPosted) {
  constexpr int kNumMessages = 20;
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    for (const int dst : {1 - self, self}) {
      for (const int64_t size : {2, 30'000}) {
        at::Tensor tensor = at::zeros({size});
        for (int i = 0; i < kNumMessages; ++i) {
          Message message = numbered(i);
          message.tensors.push_back({tensor.fill_(i), false, {}});
          rank.mailbox.post(dst, std::move(message));
        }
        tensor.fill_(-1);
      }
    }
    for (const Message& message : inbox.wait_for(4 * kNumMessages)) {
      const at::Tensor& data = message.tensors[0].data;
      EXPECT_EQ(data.min().item<double>(), message.fields[0]);
      EXPECT_EQ(data.max().item<double>(), message.fields[0]);
    }
  });
}

TEST_P(MailboxOver, StableTensorsArriveToo) {
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    for (int i = 0; i < 20; ++i) {
      Message message = numbered(i);
      message.tensors.push_back(
          {.data = at::full({30'000}, i), .is_stable = true});
      rank.mailbox.post(1 - self, std::move(message));
    }
    for (const Message& message : inbox.wait_for(20)) {
      EXPECT_EQ(message.tensors[0].data[0].item<double>(), message.fields[0]);
      EXPECT_EQ(message.tensors[0].data[-1].item<double>(), message.fields[0]);
    }
  });
}

TEST_P(MailboxOver, MessageOfAnySizeArrivesUnchanged) {
  run(2, [](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    std::mt19937 random(self);
    constexpr int kNumMessages = 200;
    for (int i = 0; i < kNumMessages; ++i) {
      // Evenly over the magnitudes, from nothing to several rings.
      const int64_t size = (int64_t{1} << random() % 18) - 1 + random() % 2;
      Message message = numbered(i);
      message.bytes.assign(random() % 100, static_cast<char>(i));
      message.tensors.push_back({at::arange(i, i + size), false, {}});
      message.tensors.push_back({at::Tensor(), true, {}});
      rank.mailbox.post(1 - self, std::move(message));
    }
    int next = 0;
    for (const Message& message : inbox.wait_for(kNumMessages)) {
      EXPECT_EQ(message.fields[0], next);
      const at::Tensor& data = message.tensors[0].data;
      EXPECT_TRUE(at::equal(data, at::arange(next, next + data.numel())));
      EXPECT_FALSE(message.tensors[1].data.defined());
      ++next;
    }
  });
}

// The receiving thread of rank 2 is held until the ring from 0 is full of a
// long message and one of 1 is there too, so that the order is decided by turns
// and not by who is faster.
TEST_P(MailboxOver, LongMessageOfOnePeerDoesNotHoldUpAnother) {
  if (!is_shared()) GTEST_SKIP() << "the in-process world sends at once";
  std::promise<void> is_held;
  std::promise<void> release;
  run(3, [&](int self, Rank& rank) {
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    if (self == 0) {
      ASSERT_EQ(is_held.get_future().wait_for(seconds(20)),
                std::future_status::ready);
      Message message = numbered(0);
      message.tensors.push_back({at::zeros({1 << 20}), false, {}});
      rank.mailbox.post(2, std::move(message));
      rank.mailbox.post(1, numbered(1));
    } else if (self == 1) {
      inbox.wait_for(1);
      rank.mailbox.post(2, numbered(0, Channel::kProbe));
      inbox.wait_for(2);
      rank.mailbox.post(2, numbered(2));
      release.set_value();
    } else {
      rank.mailbox.set_handler(Channel::kProbe, [&](Message&&) {
        is_held.set_value();
        EXPECT_EQ(release.get_future().wait_for(seconds(20)),
                  std::future_status::ready);
      });
      rank.mailbox.post(1, numbered(0));
      EXPECT_EQ(inbox.wait_for(2)[0].fields[0], 2);
      rank.mailbox.set_handler(Channel::kProbe, {});
    }
    // No rank closes its mailbox while others still send.
    for (int dst = 0; dst < 3; ++dst) {
      rank.mailbox.post(dst, numbered(0, Channel::kOrder));
    }
    Inbox ends(rank.mailbox, Channel::kOrder);
    ends.wait_for(3);
  });
}

TEST_P(MailboxOver, CloseTwiceThenPostIsAnError) {
  run(2, [](int self, Rank& rank) {
    rank.mailbox.close();
    rank.mailbox.close();
    EXPECT_THROW(rank.mailbox.post(1 - self, numbered(0)), Error);
    EXPECT_THROW(rank.mailbox.post(self, numbered(0)), Error);
    EXPECT_FALSE(rank.board->fault());
  });
}

TEST(Mailbox, UnknownRankIsAnError) {
  Rank rank(0, comm::make_local_world(1)[0]);
  EXPECT_THROW(rank.mailbox.post(1, numbered(0)), Error);
  EXPECT_THROW(rank.mailbox.post(-1, numbered(0)), Error);
}

TEST_P(MailboxOver, HandlerIsNotRunningAfterItWasReplaced) {
  run(2, [](int self, Rank& rank) {
    std::atomic<bool> is_inside = false;
    std::atomic<bool> is_replaced = false;
    rank.mailbox.set_handler(Channel::kPipeline, [&](Message&&) {
      is_inside = true;
      std::this_thread::sleep_for(milliseconds(30));
      EXPECT_FALSE(is_replaced);
    });
    rank.mailbox.post(1 - self, numbered(0));
    while (!is_inside) std::this_thread::yield();
    rank.mailbox.set_handler(Channel::kPipeline, {});
    is_replaced = true;
  });
}

TEST(MailboxOverSockets, OpensALinkWhenItIsUsed) {
  constexpr int kSize = 6;
  const auto sockets = comm::make_socket_world(kSize);
  comm::run_ranks(kSize, [&](int self, const comm::CommunicatorPtr& world) {
    Rank rank(self, world, nullptr, sockets[self]);
    world->barrier()->wait(seconds(20));
    EXPECT_EQ(sockets[self]->num_connections(), 0);
    world->barrier()->wait(seconds(20));
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    for (int i = 0; i < 3; ++i) {
      rank.mailbox.post((self + 1) % kSize, numbered(i));
    }
    inbox.wait_for(3);
    world->barrier()->wait(seconds(20));
    EXPECT_EQ(sockets[self]->num_connections(), 2);  // one each way
    world->barrier()->wait(seconds(20));
  });
}

// Two ranks that have exchanged messages over sockets.
class TwoOverSockets : public testing::Test {
 protected:
  void SetUp() override {
    Inbox inbox(zero_.mailbox, Channel::kPipeline);
    zero_.mailbox.post(1, numbered(0));
    one_.mailbox.post(0, numbered(0));
    inbox.wait_for(1);
  }

  std::vector<std::shared_ptr<comm::PeerSockets>> sockets_ =
      comm::make_socket_world(2);
  std::vector<comm::CommunicatorPtr> world_ = comm::make_local_world(2);
  Rank zero_{0, world_[0], nullptr, sockets_[0]};
  Rank one_{1, world_[1], nullptr, sockets_[1]};
};

TEST_F(TwoOverSockets, LostConnectionBecomesAFaultThatNamesThePeer) {
  sockets_[1]->close();
  ASSERT_TRUE(becomes_true([&] { return zero_.board->fault().has_value(); }));
  EXPECT_EQ(zero_.board->fault()->kind, health::Fault::Kind::kDied);
  EXPECT_EQ(zero_.board->fault()->global_rank, 1);
}

TEST_F(TwoOverSockets, LostConnectionWaitsForTheReason) {
  sockets_[1]->close();
  zero_.board->report({.kind = health::Fault::Kind::kRaised,
                       .global_rank = 1,
                       .text = "the true reason"});
  std::this_thread::sleep_for(milliseconds(1300));
  EXPECT_EQ(zero_.board->fault()->text, "the true reason");
}

TEST_F(TwoOverSockets, LostConnectionToARankThatLeftIsNoFault) {
  zero_.board->mark_left(1);
  sockets_[1]->close();
  std::this_thread::sleep_for(milliseconds(1300));
  EXPECT_FALSE(zero_.board->fault());
  EXPECT_EQ(zero_.mailbox.num_unsent(), 0);
}

TEST_F(TwoOverSockets, MessagesToARankThatIsGoneAreNotKept) {
  sockets_[1]->close();
  zero_.board->mark_left(1);
  for (int i = 0; i < 20; ++i) {
    zero_.mailbox.post(1, numbered(i));
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(becomes_true([&] { return zero_.mailbox.num_unsent() == 0; }));
}

TEST(MailboxOverSockets, RankThatCannotBeReachedIsAFault) {
  auto sockets = comm::make_socket_world(2);
  const auto world = comm::make_local_world(2);
  sockets[1]->close();
  sockets[1].reset();  // nobody listens there
  Rank zero(0, world[0], nullptr, sockets[0]);
  zero.mailbox.post(1, numbered(0));
  ASSERT_TRUE(becomes_true([&] { return zero.board->fault().has_value(); }));
  EXPECT_EQ(zero.board->fault()->global_rank, 1);
  EXPECT_NE(zero.board->fault()->text.find("cannot connect"), std::string::npos)
      << zero.board->fault()->text;
}

TEST(Mailbox, LostConnectionBecomesAFaultThatNamesThePeer) {
  const auto world = comm::make_local_world(2);
  Rank rank(0, world[0]);
  world[0]->abort();  // as if the transport had failed
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_EQ(rank.board->fault()->kind, health::Fault::Kind::kDied);
  EXPECT_EQ(rank.board->fault()->global_rank, 1);
}

TEST(Mailbox, LostConnectionWaitsForTheReason) {
  const auto world = comm::make_local_world(2);
  Rank rank(0, world[0]);
  world[0]->abort();
  rank.board->report({.kind = health::Fault::Kind::kRaised,
                      .global_rank = 1,
                      .text = "the true reason"});
  rank.mailbox.close();
  EXPECT_EQ(rank.board->fault()->text, "the true reason");
}

TEST(Mailbox, LostConnectionToARankThatLeftIsNoFault) {
  const auto world = comm::make_local_world(2);
  Rank rank(0, world[0]);
  rank.board->mark_left(1);
  world[0]->abort();
  std::this_thread::sleep_for(milliseconds(1300));
  EXPECT_FALSE(rank.board->fault());
}

TEST(Mailbox, CorruptMessageBecomesAFaultThatNamesItsSource) {
  const auto world = comm::make_local_world(2);
  Rank rank(0, world[0]);
  world[1]
      ->send(at::zeros({wire::kPacketBytes}, at::kByte), 0, 1)
      ->wait(seconds(5));
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_NE(rank.board->fault()->text.find("message from global_rank 1"),
            std::string::npos);
}

TEST_P(MailboxOver, ExceptionOfAHandlerBecomesAFault) {
  run(2, [](int self, Rank& rank) {
    rank.mailbox.set_handler(Channel::kPipeline,
                             [](Message&&) { throw Error("handler broke"); });
    rank.mailbox.post(1 - self, numbered(0));
    EXPECT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
    EXPECT_EQ(rank.board->fault()->text, "handler broke");
  });
}

}  // namespace
}  // namespace smp::mailbox
