#include "csrc/comm/mailbox.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/comm/wire.h"
#include "csrc/common/check.h"
#include "tests/cpp/comm/run_ranks.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Rank {
  Rank(int global_rank, CommunicatorPtr world)
      : board(std::make_shared<FaultBoard>(global_rank)),
        mailbox(std::move(world), board) {}

  std::shared_ptr<FaultBoard> board;
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

template <typename Pred>
bool becomes_true(Pred pred) {
  for (int i = 0; i < 2000; ++i) {
    if (pred()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

TEST(Mailbox, MessagesOfOneSenderArriveInOrderWhateverTheirSize) {
  constexpr int kNumMessages = 60;
  run_ranks(3, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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

TEST(Mailbox, ManyThreadsMayPost) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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

TEST(Mailbox, ChannelKeepsMessagesUntilItHasAHandler) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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
  Rank rank(0, make_local_world(1)[0]);
  std::promise<std::thread::id> arrived;
  rank.mailbox.set_handler(Channel::kPipeline, [&](Message&& message) {
    EXPECT_EQ(message.source_rank, 0);
    arrived.set_value(std::this_thread::get_id());
  });
  rank.mailbox.post(0, numbered(1));
  EXPECT_NE(arrived.get_future().get(), std::this_thread::get_id());
}

TEST(Mailbox, HandlerMayPost) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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

TEST(Mailbox, StatsCountWhatIsOnTheWire) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
    Inbox inbox(rank.mailbox, Channel::kPipeline);
    Message message = numbered(0);
    message.tensors.push_back({at::zeros({100'000}), false, {}});
    rank.mailbox.post(1 - self, std::move(message));
    inbox.wait_for(1);
    const Mailbox::Stats stats = rank.mailbox.stats();
    EXPECT_EQ(stats.messages_sent, 1);
    EXPECT_EQ(stats.messages_received, 1);
    EXPECT_EQ(stats.bytes_sent, wire::kPacketBytes + 400'000);
    EXPECT_EQ(stats.bytes_received, stats.bytes_sent);
    EXPECT_EQ(rank.mailbox.progress(), 2);
    EXPECT_TRUE(becomes_true([&] { return rank.mailbox.num_unsent() == 0; }));
    EXPECT_EQ(rank.board->waits().snapshot().num_unsent, 0);
  });
}

TEST(Mailbox, TensorsAreFreedOnceSent) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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

TEST(Mailbox, CloseTwiceThenPostIsAnError) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
    rank.mailbox.close();
    rank.mailbox.close();
    EXPECT_THROW(rank.mailbox.post(1 - self, numbered(0)), Error);
    EXPECT_THROW(rank.mailbox.post(self, numbered(0)), Error);
    EXPECT_FALSE(rank.board->fault());
  });
}

TEST(Mailbox, UnknownRankIsAnError) {
  Rank rank(0, make_local_world(1)[0]);
  EXPECT_THROW(rank.mailbox.post(1, numbered(0)), Error);
  EXPECT_THROW(rank.mailbox.post(-1, numbered(0)), Error);
}

TEST(Mailbox, HandlerIsNotRunningAfterItWasReplaced) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
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

TEST(Mailbox, LostConnectionBecomesAFaultThatNamesThePeer) {
  const auto world = make_local_world(2);
  Rank rank(0, world[0]);
  world[0]->abort();  // as if the transport had failed
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_EQ(rank.board->fault()->kind, Fault::Kind::kDied);
  EXPECT_EQ(rank.board->fault()->global_rank, 1);
}

TEST(Mailbox, LostConnectionWaitsForTheReason) {
  const auto world = make_local_world(2);
  Rank rank(0, world[0]);
  world[0]->abort();
  rank.board->report({.kind = Fault::Kind::kRaised,
                      .global_rank = 1,
                      .text = "the true reason"});
  rank.mailbox.close();
  EXPECT_EQ(rank.board->fault()->text, "the true reason");
}

TEST(Mailbox, LostConnectionToARankThatLeftIsNoFault) {
  const auto world = make_local_world(2);
  Rank rank(0, world[0]);
  rank.board->mark_left(1);
  world[0]->abort();
  std::this_thread::sleep_for(milliseconds(1300));
  EXPECT_FALSE(rank.board->fault());
}

TEST(Mailbox, CorruptMessageBecomesAFaultThatNamesItsSource) {
  const auto world = make_local_world(2);
  Rank rank(0, world[0]);
  world[1]
      ->send(at::zeros({wire::kPacketBytes}, at::kByte), 0, 1)
      ->wait(seconds(5));
  ASSERT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
  EXPECT_NE(rank.board->fault()->text.find("message from global_rank 1"),
            std::string::npos);
}

TEST(Mailbox, ExceptionOfAHandlerBecomesAFault) {
  run_ranks(2, [](int self, const CommunicatorPtr& world) {
    Rank rank(self, world);
    rank.mailbox.set_handler(Channel::kPipeline,
                             [](Message&&) { throw Error("handler broke"); });
    rank.mailbox.post(1 - self, numbered(0));
    EXPECT_TRUE(becomes_true([&] { return rank.board->fault().has_value(); }));
    EXPECT_EQ(rank.board->fault()->text, "handler broke");
  });
}

}  // namespace
}  // namespace smp::comm
