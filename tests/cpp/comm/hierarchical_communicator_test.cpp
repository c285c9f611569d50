#include "csrc/comm/hierarchical_communicator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/host_world.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPatientHosts = std::chrono::seconds(20);
// A count of doubles: several pieces, the last one of an odd size.
constexpr int64_t kLongSum = 3 * kShareBytes / 8 * 4 + 12'345;

using Body = std::function<void(int, const CommunicatorPtr&)>;

void run_on_hosts(const HostWorld& world, const Body& body) {
  const std::vector<HostGroups> groups = world.make_groups();
  run_ranks(world.size(), [&](int rank, const CommunicatorPtr&) {
    body(rank, make_hierarchical_communicator(groups[rank]));
  });
}

class OnHosts : public testing::TestWithParam<HostWorld> {};

INSTANTIATE_TEST_SUITE_P(Hosts, OnHosts,
                         testing::Values(HostWorld{2, 2}, HostWorld{2, 4},
                                         HostWorld{4, 2}, HostWorld{3, 3},
                                         HostWorld{2, 3, true},
                                         HostWorld{3, 2, true}),
                         [](const auto& info) {
                           const HostWorld& world = info.param;
                           return std::to_string(world.num_hosts) + "x" +
                                  std::to_string(world.per_host) +
                                  (world.is_dealt ? "dealt" : "");
                         });

TEST_P(OnHosts, KeepsEveryPromiseOfACommunicator) {
  run_on_hosts(GetParam(), [](int, const CommunicatorPtr& comm) {
    for (const suite::Check& one : suite::all_checks()) one.check(*comm);
  });
}

TEST_P(OnHosts, AbortEndsWaits) {
  run_on_hosts(GetParam(), [](int, const CommunicatorPtr& comm) {
    suite::check_abort_ends_waits(*comm, /*with_collective=*/true);
  });
}

TEST_P(OnHosts, LongTensorsAreSummedScatteredAndGathered) {
  const int size = GetParam().size();
  run_on_hosts(GetParam(), [&](int rank, const CommunicatorPtr& comm) {
    const at::Tensor numbers =
        at::arange(kLongSum, at::TensorOptions(at::kDouble));
    const int64_t others = size * (size - 1) / 2;
    at::Tensor sum = numbers.add(rank);
    comm->all_reduce(sum, ReduceOp::kSum)->wait(kPatientHosts);
    EXPECT_TRUE(sum.equal(numbers.mul(size).add(others)));
    at::Tensor least = numbers.mul(rank + 1).neg();
    comm->all_reduce(least, ReduceOp::kMin)->wait(kPatientHosts);
    EXPECT_TRUE(least.equal(numbers.mul(-size)));

    const at::Tensor part = numbers.narrow(0, 0, 70'001);
    const at::Tensor all = at::zeros({size, part.numel()}, part.options());
    comm->all_gather(all, part.add(rank))->wait(kPatientHosts);
    for (int i = 0; i < size; ++i) EXPECT_TRUE(all[i].equal(part.add(i)));
    const at::Tensor mine = at::zeros_like(part);
    comm->reduce_scatter(mine, all.add(rank), ReduceOp::kSum)
        ->wait(kPatientHosts);
    EXPECT_TRUE(mine.equal(part.add(rank).mul(size).add(others)));
  });
}

// The sum of these numbers depends on the order in which they are added.
TEST_P(OnHosts, EveryRankHasTheSameBitsInEveryRun) {
  const int size = GetParam().size();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> inputs;
    for (int i = 0; i < size; ++i) {
      inputs.push_back(at::randn({300'007}).mul(1 << i).to(dtype));
    }
    std::vector<std::vector<at::Tensor>> runs;
    for (int run = 0; run < 2; ++run) {
      std::vector<at::Tensor> sums(static_cast<size_t>(size));
      run_on_hosts(GetParam(), [&](int rank, const CommunicatorPtr& comm) {
        sums[rank] = inputs[rank].clone();
        comm->all_reduce(sums[rank], ReduceOp::kSum)->wait(kPatientHosts);
      });
      runs.push_back(std::move(sums));
    }
    for (const auto& run : runs) {
      for (const at::Tensor& sum : run) EXPECT_TRUE(sum.equal(runs[0][0]));
    }
  }
}

TEST_P(OnHosts, ManyInFlightEndWhetherOrNotSomebodyWaits) {
  const int size = GetParam().size();
  run_on_hosts(GetParam(), [&](int rank, const CommunicatorPtr& comm) {
    if (rank == size - 1) std::this_thread::sleep_for(milliseconds(30));
    std::vector<at::Tensor> sums;
    std::vector<at::Tensor> gathered;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 12; ++i) {
      sums.push_back(at::full({1000 + i}, i));
      gathered.push_back(at::empty({size * 3}));
      works.push_back(comm->all_reduce(sums.back(), ReduceOp::kSum));
      works.push_back(
          comm->all_gather(gathered.back(), at::full({3}, 1.0 * rank)));
    }
    EXPECT_TRUE(becomes_true([&] {
      return std::all_of(works.begin(), works.end(),
                         [](const WorkPtr& work) { return work->done(); });
    }));
    for (int i = 0; i < 12; ++i) {
      works[2 * i]->wait(milliseconds(0));
      EXPECT_TRUE(sums[i].eq(i * size).all().item<bool>());
      for (int other = 0; other < size; ++other) {
        EXPECT_TRUE(
            gathered[i].narrow(0, 3 * other, 3).eq(other).all().item<bool>());
      }
    }
  });
}

TEST_P(OnHosts, SumsDoNotNeedTheFlatGroup) {
  std::vector<HostGroups> groups = GetParam().make_groups();
  run_ranks(GetParam().size(), [&](int rank, const CommunicatorPtr&) {
    groups[rank].flat->abort();
    const CommunicatorPtr comm = make_hierarchical_communicator(groups[rank]);
    const at::Tensor sum = at::full({5}, 1.0);
    comm->all_reduce(sum, ReduceOp::kSum)->wait(kPatientHosts);
    EXPECT_TRUE(sum.eq(comm->size()).all().item<bool>());
    EXPECT_NE(error_of([&] { comm->broadcast(sum, 0); }).find("aborted"),
              std::string::npos);
  });
}

// So many that parts of a reduce_scatter are no longer sent to all at once.
TEST(HierarchicalCommunicator, ManyHostsScatterToo) {
  const HostWorld world{17, 2};
  run_on_hosts(world, [&](int rank, const CommunicatorPtr& comm) {
    const at::Tensor input =
        at::arange(3 * world.size(), at::TensorOptions(at::kDouble)).add(rank);
    const at::Tensor part = at::empty({3}, input.options());
    comm->reduce_scatter(part, input, ReduceOp::kSum)->wait(kPatientHosts);
    const int64_t others = world.size() * (world.size() - 1) / 2;
    EXPECT_TRUE(part.equal(
        input.narrow(0, 3 * rank, 3).sub(rank).mul(world.size()).add(others)));
  });
}

TEST(HierarchicalCommunicator, AnErrorSaysWhereAndEndsWhatFollows) {
  const HostWorld world{2, 2};
  std::vector<HostGroups> groups = world.make_groups();
  run_ranks(world.size(), [&](int rank, const CommunicatorPtr&) {
    const HostGroups& own = groups[rank];
    const CommunicatorPtr comm = make_hierarchical_communicator(own);
    own.across->abort();
    const WorkPtr first = comm->all_reduce(at::zeros({4}), ReduceOp::kSum);
    const std::string text = error_of([&] { first->wait(kPatientHosts); });
    EXPECT_NE(text.find("all_reduce on local"), std::string::npos) << text;
    EXPECT_NE(text.find("across"), std::string::npos) << text;
    EXPECT_TRUE(first->done());
    const std::string again = error_of([&] {
      comm->all_reduce(at::zeros({4}), ReduceOp::kSum)->wait(kPatientHosts);
    });
    EXPECT_NE(again.find("across"), std::string::npos) << again;
  });
}

TEST(HierarchicalCommunicator, GroupsThatDoNotFitAreRefused) {
  const std::vector<HostGroups> groups = HostWorld{2, 2}.make_groups();
  HostGroups wrong = groups[1];
  wrong.across = groups[1].scatter;
  wrong.gather = nullptr;
  EXPECT_THROW(make_hierarchical_communicator(wrong), ValueError);
  wrong = groups[1];
  wrong.flat = make_local_world(6)[1];
  EXPECT_THROW(make_hierarchical_communicator(wrong), ValueError);
  wrong = groups[1];
  wrong.across = groups[3].across;
  EXPECT_THROW(make_hierarchical_communicator(wrong), ValueError);
  wrong.is_host_by_host = false;  // then nobody minds
  EXPECT_EQ(make_hierarchical_communicator(wrong)->group_rank(), 1);
}

}  // namespace
}  // namespace smp::comm
