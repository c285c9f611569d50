#include "csrc/mailbox/object_exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/socket_world.h"
#include "tests/cpp/common/expectations.h"

namespace smp::mailbox {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct ExchangingRank {
  explicit ExchangingRank(const comm::CommunicatorPtr& world,
                          std::shared_ptr<comm::PeerSockets> sockets = nullptr)
      : board(std::make_shared<health::FaultBoard>(world->group_rank())),
        mailbox(std::make_shared<Mailbox>(
            world, board, nullptr, lanes::LaneOptions{}, std::move(sockets))),
        exchange(mailbox, board, seconds(20)),
        all(world->size()) {
    std::iota(all.begin(), all.end(), 0);
  }

  std::shared_ptr<health::FaultBoard> board;
  std::shared_ptr<Mailbox> mailbox;
  ObjectExchange exchange;
  std::vector<int> all;
};

void run(int size, const std::function<void(int, ExchangingRank&)>& body) {
  comm::run_ranks(size, [&](int self, const comm::CommunicatorPtr& world) {
    ExchangingRank rank(world);
    body(self, rank);
  });
}

TEST(ObjectExchange, SendReturnsOnlyAfterReceive) {
  std::atomic<bool> is_receiving = false;
  run(2, [&](int self, ExchangingRank& rank) {
    if (self == 0) {
      rank.exchange.send(1, {"hello"});
      EXPECT_TRUE(is_receiving);
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      is_receiving = true;
      EXPECT_EQ(rank.exchange.recv(0).bytes, "hello");
    }
  });
}

TEST(ObjectExchange, LargeAndEmptyObjectsArrive) {
  run(2, [](int self, ExchangingRank& rank) {
    const std::string large(20'000'000, 'q');
    if (self == 0) {
      rank.exchange.send(1, {large});
      rank.exchange.send(1, {""});
    } else {
      EXPECT_EQ(rank.exchange.recv(0).bytes, large);
      EXPECT_EQ(rank.exchange.recv(0).bytes, "");
    }
  });
}

TEST(ObjectExchange, TensorsArriveWithTheirObject) {
  run(2, [](int self, ExchangingRank& rank) {
    const at::Tensor large = at::arange(3'000'000, at::kDouble);
    const at::Tensor turned = at::arange(12, at::kLong).view({3, 4}).t();
    const std::string text(20'000, 'q');
    if (self == 0) {
      rank.exchange.send(1, {"a", {large, turned, at::empty({0, 2})}});
      rank.exchange.broadcast(rank.all, {text, {turned}});
      rank.exchange.send(0, {"own", {large}});
    }
    const Object first = rank.exchange.recv(0);
    if (self == 1) {
      EXPECT_EQ(first.bytes, "a");
      ASSERT_EQ(first.tensors.size(), 3U);
      EXPECT_TRUE(first.tensors[0].equal(large));
      EXPECT_TRUE(first.tensors[1].equal(turned));
      EXPECT_EQ(first.tensors[2].sizes(), (std::vector<int64_t>{0, 2}));
      const Object second = rank.exchange.recv(0);
      EXPECT_EQ(second.bytes, text);
      ASSERT_EQ(second.tensors.size(), 1U);
      EXPECT_TRUE(second.tensors[0].equal(turned));
    } else {
      ASSERT_EQ(first.tensors.size(), 1U);
      EXPECT_TRUE(first.tensors[0].equal(large));
      EXPECT_FALSE(first.tensors[0].is_alias_of(large));
    }
  });
}

TEST(ObjectExchange, SelfSendReturnsAtOnce) {
  run(2, [](int self, ExchangingRank& rank) {
    rank.exchange.send(self, {"a"});
    rank.exchange.send(self, {std::string(50'000, 'b')});
    EXPECT_EQ(rank.exchange.recv(self).bytes, "a");
    EXPECT_EQ(rank.exchange.recv(self).bytes, std::string(50'000, 'b'));
  });
}

TEST(ObjectExchange, SendsAndBroadcastsOfOneSourceKeepTheirOrder) {
  run(3, [](int self, ExchangingRank& rank) {
    if (self == 0) {
      for (int i = 0; i < 20; ++i) {
        rank.exchange.broadcast(rank.all, {"all" + std::to_string(i)});
        rank.exchange.send(1, {"one" + std::to_string(i)});
      }
      return;
    }
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(rank.exchange.recv(0).bytes, "all" + std::to_string(i));
      if (self == 1) {
        EXPECT_EQ(rank.exchange.recv(0).bytes, "one" + std::to_string(i));
      }
    }
  });
}

TEST(ObjectExchange, ReceiverChoosesTheSource) {
  run(3, [](int self, ExchangingRank& rank) {
    if (self > 0) {
      rank.exchange.send(0, {std::to_string(self)});
      return;
    }
    EXPECT_EQ(rank.exchange.recv(2).bytes, "2");
    EXPECT_EQ(rank.exchange.recv(1).bytes, "1");
  });
}

TEST(ObjectExchange, AllGatherOrdersByTheListedRanks) {
  run(4, [](int self, ExchangingRank& rank) {
    const std::vector<int> order = {2, 0, 3, 1};
    const auto got = rank.exchange.all_gather(order, std::to_string(self));
    EXPECT_EQ(got, (std::vector<std::string>{"2", "0", "3", "1"}));
  });
}

// Enough ranks for relays; each has talked to log2(n) others only.
TEST(ObjectExchange, LargeGroupsGatherOverFewLinks) {
  constexpr int kSize = 21;
  const auto sockets = comm::make_socket_world(kSize);
  comm::run_ranks(kSize, [&](int self, const comm::CommunicatorPtr& world) {
    ExchangingRank rank(world, sockets[self]);
    for (int round = 0; round < 3; ++round) {
      // Some are longer than what travels in one piece.
      const std::string mine(self % 3 == 0 ? 20'000 + self : self, 'a' + round);
      const auto got = rank.exchange.all_gather(rank.all, mine);
      for (int i = 0; i < kSize; ++i) {
        EXPECT_EQ(got[i],
                  std::string(i % 3 == 0 ? 20'000 + i : i, 'a' + round));
      }
      rank.exchange.barrier(rank.all);
    }
    world->barrier()->wait(seconds(20));
    EXPECT_LE(sockets[self]->num_connections(), 2 * 5);
    world->barrier()->wait(seconds(20));
  });
}

// A rank that has not come relays all the same, so that only those are missing
// that really are.
TEST(ObjectExchange, RelaysNameTheRanksThatAreMissing) {
  constexpr int kSize = 16;
  run(kSize, [](int self, ExchangingRank& rank) {
    if (self != 5 && self != 6) {
      rank.exchange.set_timeout(milliseconds(1500));
      const std::string text =
          error_of([&] { rank.exchange.barrier(rank.all, "smp.barrier"); });
      EXPECT_NE(text.find("waiting for global_ranks 5 6"), std::string::npos)
          << text;
    } else {
      std::this_thread::sleep_for(milliseconds(2500));
    }
  });
}

TEST(ObjectExchange, GroupOfOneReturnsAtOnce) {
  run(2, [](int self, ExchangingRank& rank) {
    EXPECT_EQ(rank.exchange.all_gather({self}, "x"),
              std::vector<std::string>{"x"});
    rank.exchange.barrier({self});
    rank.exchange.broadcast({self}, {"x"});
  });
}

TEST(ObjectExchange, BarrierWaitsForAll) {
  std::atomic<int> num_inside = 0;
  run(4, [&](int self, ExchangingRank& rank) {
    for (int round = 1; round <= 10; ++round) {
      if (self == round % 4) std::this_thread::sleep_for(milliseconds(5));
      ++num_inside;
      rank.exchange.barrier(rank.all);
      EXPECT_GE(num_inside, 4 * round);
      rank.exchange.barrier(rank.all);
    }
  });
}

TEST(ObjectExchange, CollectivesOfSeveralGroupsAndMessagesDoNotMix) {
  run(4, [](int self, ExchangingRank& rank) {
    const std::vector<int> pair =
        self < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    const int peer = self ^ 1;
    for (int i = 0; i < 20; ++i) {
      const std::string mine = std::to_string(self) + "." + std::to_string(i);
      const std::string theirs = std::to_string(peer) + "." + std::to_string(i);
      // The first rank of each pair sends before, the other receives after the
      // collectives.
      std::thread sender;
      if (self % 2 == 0) {
        sender = std::thread([&] { rank.exchange.send(peer, {mine}); });
      }
      const auto small = rank.exchange.all_gather(pair, mine);
      const auto all = rank.exchange.all_gather(rank.all, mine);
      EXPECT_EQ(small[1 - (self % 2)], theirs);
      EXPECT_EQ(all[peer], theirs);
      if (self % 2 == 1) {
        EXPECT_EQ(rank.exchange.recv(peer).bytes, theirs);
      } else {
        sender.join();
      }
    }
  });
}

TEST(ObjectExchange, TimeoutNamesTheOperationAndTheMissingRanks) {
  run(3, [](int self, ExchangingRank& rank) {
    if (self == 0) {
      rank.exchange.set_timeout(milliseconds(200));
      const std::string text =
          error_of([&] { rank.exchange.barrier(rank.all, "smp.barrier"); });
      EXPECT_NE(text.find("timed out after 0.2 s in smp.barrier over "
                          "global_ranks 0 1 2, waiting for global_ranks 1 2"),
                std::string::npos)
          << text;
      EXPECT_NE(error_of([&] { rank.exchange.recv(2); }).find("recv_from(2)"),
                std::string::npos);
      EXPECT_NE(error_of([&] { rank.exchange.send(1, {"x"}); }).find("send(1)"),
                std::string::npos);
    }
  });
}

TEST(ObjectExchange, FaultEndsAWait) {
  run(2, [](int self, ExchangingRank& rank) {
    if (self == 1) return;
    std::thread reporter([&] {
      while (!rank.board->waits().snapshot().is_blocked) {
        std::this_thread::yield();
      }
      rank.board->report({.kind = health::Fault::Kind::kRaised,
                          .global_rank = 0,
                          .text = "boom"});
    });
    EXPECT_THROW(rank.exchange.recv(1), PeerFailure);
    reporter.join();
  });
}

TEST(ObjectExchange, RankThatLeftEndsAWaitForIt) {
  run(2, [](int self, ExchangingRank& rank) {
    if (self == 1) return;
    rank.board->mark_left(1);
    EXPECT_NE(error_of([&] {
                rank.exchange.barrier(rank.all);
              }).find("global_rank 1 has left"),
              std::string::npos);
  });
}

TEST(ObjectExchange, DifferentCollectivesOfOneGroupAreToldApart) {
  run(2, [](int self, ExchangingRank& rank) {
    const std::string text = error_of([&] {
      if (self == 0) {
        rank.exchange.barrier(rank.all);
      } else {
        rank.exchange.all_gather(rank.all, "x");
      }
    });
    EXPECT_NE(text.find("make the same calls"), std::string::npos) << text;
  });
}

TEST(ObjectExchange, WrongRanksAreValueErrors) {
  run(2, [](int self, ExchangingRank& rank) {
    EXPECT_THROW(rank.exchange.send(2, {"x"}), ValueError);
    EXPECT_THROW(rank.exchange.recv(-1), ValueError);
    EXPECT_THROW(rank.exchange.barrier({1 - self}), ValueError);
    EXPECT_THROW(rank.exchange.barrier({0, 1, 1}), ValueError);
    EXPECT_THROW(rank.exchange.broadcast({0, 5}, {"x"}), ValueError);
  });
}

TEST(ObjectExchange, InterruptEndsAWait) {
  run(2, [](int self, ExchangingRank& rank) {
    if (self == 1) return;
    rank.board->set_interrupt_check([] { throw Error("Ctrl-C"); });
    EXPECT_EQ(error_of([&] { rank.exchange.recv(1); }), "Ctrl-C");
  });
}

}  // namespace
}  // namespace smp::mailbox
