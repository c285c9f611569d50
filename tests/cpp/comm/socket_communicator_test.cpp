#include "csrc/comm/socket_communicator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/comm/socket_world.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPatient = std::chrono::seconds(20);

using Sockets = std::vector<std::shared_ptr<PeerSockets>>;

void run_over_sockets(
    const Sockets& world,
    const std::function<void(int, const CommunicatorPtr&)>& body) {
  const int size = static_cast<int>(world.size());
  run_ranks(size, [&](int rank, const CommunicatorPtr&) {
    body(rank,
         make_socket_communicator(world[rank], "tcp:suite", all_ranks(size)));
  });
}

class OverSockets : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, OverSockets, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(OverSockets, KeepsEveryPromiseOfACommunicator) {
  for (const suite::Check& one : suite::all_checks()) {
    SCOPED_TRACE(one.name);
    EXPECT_EQ(error_of([&] {
                run_over_sockets(make_socket_world(GetParam()),
                                 [&](int, const CommunicatorPtr& comm) {
                                   one.check(*comm);
                                   comm->barrier()->wait(kPatient);
                                 });
              }),
              "no error");
  }
}

TEST_P(OverSockets, KeepsEveryPromiseOneAfterAnother) {
  run_over_sockets(make_socket_world(GetParam()),
                   [](int, const CommunicatorPtr& comm) {
                     for (const suite::Check& one : suite::all_checks()) {
                       one.check(*comm);
                     }
                     comm->barrier()->wait(kPatient);
                   });
}

TEST_P(OverSockets, AbortEndsWaits) {
  run_over_sockets(make_socket_world(GetParam()),
                   [](int, const CommunicatorPtr& comm) {
                     suite::check_abort_ends_waits(*comm,
                                                   /*with_collective=*/true);
                   });
}

// Long tensors go round rings and down trees in pieces.
TEST_P(OverSockets, LongTensorsAreSummedGatheredAndBroadcast) {
  const int size = GetParam();
  constexpr int64_t kNumel = 700'001;  // several pieces, uneven chunks
  run_over_sockets(make_socket_world(size), [&](int rank,
                                                const CommunicatorPtr& comm) {
    const at::Tensor numbers =
        at::arange(kNumel, at::TensorOptions(at::kDouble));
    at::Tensor sum = numbers.add(rank);
    comm->all_reduce(sum, ReduceOp::kSum)->wait(kPatient);
    EXPECT_TRUE(sum.equal(numbers.mul(size).add(size * (size - 1) / 2)));

    const at::Tensor all = at::zeros({size, kNumel}, numbers.options());
    comm->all_gather(all, numbers.add(rank))->wait(kPatient);
    for (int i = 0; i < size; ++i) EXPECT_TRUE(all[i].equal(numbers.add(i)));

    const at::Tensor part = at::zeros({kNumel}, numbers.options());
    comm->reduce_scatter(part, all.add(rank), ReduceOp::kSum)->wait(kPatient);
    const int64_t others = size * (size - 1) / 2;
    EXPECT_TRUE(part.equal(numbers.add(rank).mul(size).add(others)));

    at::Tensor same = rank == size - 1 ? numbers.clone() : numbers.mul(0);
    comm->broadcast(same, size - 1)->wait(kPatient);
    EXPECT_TRUE(same.equal(numbers));
  });
}

TEST(SocketCommunicator, EveryRankHasTheSameBits) {
  constexpr int kSize = 5;
  std::vector<at::Tensor> sums(kSize);
  run_over_sockets(
      make_socket_world(kSize), [&](int rank, const CommunicatorPtr& comm) {
        for (const int64_t numel : {7, 100'000}) {
          at::Tensor sum = at::rand({numel}).mul(std::pow(10.0, rank));
          comm->all_reduce(sum, ReduceOp::kSum)->wait(kPatient);
          sums[rank] = sum;
          comm->barrier()->wait(kPatient);
          EXPECT_TRUE(sum.equal(sums[(rank + 1) % kSize]));
          comm->barrier()->wait(kPatient);
        }
      });
}

// However many groups there are, and whatever they do.
TEST(SocketCommunicator, ConnectionsGrowWithTheLogarithm) {
  for (const int size : {8, 32}) {
    const Sockets world = make_socket_world(size);
    EXPECT_EQ(world[0]->num_connections(), 0);
    run_ranks(size, [&](int rank, const CommunicatorPtr&) {
      std::vector<CommunicatorPtr> groups;
      for (const char* name : {"tcp:a", "tcp:b", "tcp:c"}) {
        groups.push_back(
            make_socket_communicator(world[rank], name, all_ranks(size)));
      }
      for (const CommunicatorPtr& group : groups) {
        group->all_reduce(at::full({3}, rank), ReduceOp::kSum)->wait(kPatient);
        group->all_reduce(at::full({50'000}, rank), ReduceOp::kSum)
            ->wait(kPatient);
        group->all_gather(at::empty({size}), at::full({1}, 1.0 * rank))
            ->wait(kPatient);
        for (int root = 0; root < size; ++root) {
          group->broadcast(at::full({5}, rank), root)->wait(kPatient);
        }
        group->barrier()->wait(kPatient);
      }
    });
    const int logarithm = static_cast<int>(std::log2(size));
    for (const auto& sockets : world) {
      EXPECT_EQ(sockets->num_connections(), 2 * logarithm) << size << " ranks";
    }
  }
}

TEST(SocketCommunicator, NothingIsLostBeforeTheOtherSideHasItsGroup) {
  const Sockets world = make_socket_world(2);
  run_ranks(2, [&](int rank, const CommunicatorPtr&) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(100));
    const CommunicatorPtr group =
        make_socket_communicator(world[rank], "tcp:late", {0, 1});
    if (rank == 0) {
      for (int i = 0; i < 20; ++i) group->send(at::full({1000}, i), 1, 0);
      group->barrier()->wait(kPatient);
      return;
    }
    for (int i = 0; i < 20; ++i) {
      const at::Tensor got = at::zeros({1000}, at::TensorOptions(at::kLong));
      group->recv(got, 0, 0)->wait(kPatient);
      EXPECT_EQ(got[999].item<int64_t>(), i);
    }
    group->barrier()->wait(kPatient);
  });
}

TEST(SocketCommunicator, ABrokenConnectionNamesItsPeer) {
  Sockets world = make_socket_world(2);
  std::promise<void> both_are_there;  // a run ends when all are through
  run_ranks(2, [&](int rank, const CommunicatorPtr&) {
    CommunicatorPtr group =
        make_socket_communicator(world[rank], "tcp:broken", {0, 1});
    group->barrier()->wait(kPatient);
    if (rank == 0) both_are_there.set_value();
    if (rank == 1) {
      both_are_there.get_future().wait();
      world[1]->close();
      return;
    }
    const WorkPtr recv = group->recv(at::zeros({5}), 1, 3);
    const std::string text = error_of([&] { recv->wait(kPatient); });
    EXPECT_NE(text.find("recv(src=1, tag=3) on tcp:broken"), std::string::npos)
        << text;
    EXPECT_NE(text.find("the connection to group rank 1 (global_rank 1) broke"),
              std::string::npos)
        << text;
    const WorkPtr sum = group->all_reduce(at::zeros({5}), ReduceOp::kSum);
    EXPECT_NE(error_of([&] { sum->wait(kPatient); }).find("broke"),
              std::string::npos);
  });
}

TEST(SocketCommunicator, RanksThatCallDifferentThingsAreTold) {
  run_over_sockets(make_socket_world(2), [](int rank,
                                            const CommunicatorPtr& comm) {
    const WorkPtr work = rank == 0
                             ? comm->all_reduce(at::zeros({5}), ReduceOp::kSum)
                             : comm->all_reduce(at::zeros({6}), ReduceOp::kSum);
    EXPECT_NE(error_of([&] { work->wait(kPatient); }).find("with other sizes"),
              std::string::npos);
    comm->barrier()->wait(kPatient);
  });
}

TEST(SocketCommunicator, RanksWithDifferentSecretsDoNotTalk) {
  const Sockets world = {
      std::make_shared<PeerSockets>(0, PeerSockets::Options{.secret = kSecret}),
      std::make_shared<PeerSockets>(
          1, PeerSockets::Options{.secret = std::string(32, 'x')})};
  for (const auto& one : world) {
    one->set_addresses({world[0]->address(), world[1]->address()});
  }
  const CommunicatorPtr mine =
      make_socket_communicator(world[0], "tcp:pair", {0, 1});
  const CommunicatorPtr theirs =
      make_socket_communicator(world[1], "tcp:pair", {0, 1});
  const WorkPtr recv = mine->recv(at::zeros({5}), 1, 0);
  const WorkPtr send = theirs->send(at::zeros({5}), 0, 0);
  EXPECT_NE(error_of([&] {
              send->wait(kPatient);
            }).find("does not know the secret of this job"),
            std::string::npos);
  EXPECT_NE(error_of([&] { recv->wait(milliseconds(200)); }).find("timed out"),
            std::string::npos);
  EXPECT_EQ(world[0]->num_connections(), 0);
}

}  // namespace
}  // namespace smp::comm
