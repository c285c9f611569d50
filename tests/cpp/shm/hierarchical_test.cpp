// Collectives of several hosts whose ranks share memory within each.
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>

#include "csrc/comm/hierarchical_communicator.h"

#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/host_world.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::shm {
namespace {

constexpr auto kPatientHosts = std::chrono::seconds(20);

std::vector<comm::CommunicatorPtr> make_sharing_world(int size,
                                                      std::string name) {
  return share_collectives_locally(
      comm::make_local_world(size, std::move(name)));
}

class SharingHosts : public testing::TestWithParam<std::pair<int, int>> {
 protected:
  void run(const std::function<void(int, const comm::CommunicatorPtr&)>& body) {
    const auto [num_hosts, per_host] = GetParam();
    const comm::HostWorld world{num_hosts, per_host, false, make_sharing_world};
    const auto groups = world.make_groups();
    comm::run_ranks(world.size(), [&](int rank, const comm::CommunicatorPtr&) {
      body(rank, comm::make_hierarchical_communicator(groups[rank]));
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Hosts, SharingHosts,
                         testing::Values(std::pair{2, 2}, std::pair{2, 4},
                                         std::pair{4, 2}, std::pair{2, 3}));

TEST_P(SharingHosts, KeepEveryPromiseOfACommunicator) {
  run([](int, const comm::CommunicatorPtr& comm) {
    for (const auto& one : comm::suite::all_checks()) one.check(*comm);
  });
}

TEST_P(SharingHosts, AbortEndsWaits) {
  run([](int, const comm::CommunicatorPtr& comm) {
    comm::suite::check_abort_ends_waits(*comm, /*with_collective=*/true);
  });
}

TEST_P(SharingHosts, LongTensorsAreAddedUpAlikeOnAllRanks) {
  const int size = GetParam().first * GetParam().second;
  const int64_t n = 400'003;
  std::vector<at::Tensor> inputs;
  at::Tensor sum = at::zeros({size * n}, at::kDouble);
  for (int i = 0; i < size; ++i) {
    inputs.push_back(at::randn({size * n}));
    sum.add_(inputs.back());
  }
  std::vector<at::Tensor> sums(static_cast<size_t>(size));
  run([&](int rank, const comm::CommunicatorPtr& comm) {
    sums[rank] = inputs[rank].clone();
    const at::Tensor part = at::empty({n});
    const comm::WorkPtr reduced =
        comm->all_reduce(sums[rank], comm::ReduceOp::kSum);
    const comm::WorkPtr scattered =
        comm->reduce_scatter(part, inputs[rank], comm::ReduceOp::kSum);
    scattered->wait(kPatientHosts);
    reduced->wait(kPatientHosts);
    EXPECT_TRUE(at::allclose(sums[rank].to(at::kDouble), sum, 1e-5, 1e-5));
    EXPECT_TRUE(
        at::allclose(part, sums[rank].narrow(0, rank * n, n), 1e-5, 1e-5));
    const at::Tensor whole = at::empty({size * n});
    comm->all_gather(whole, sums[rank].narrow(0, rank * n, n))
        ->wait(kPatientHosts);
    EXPECT_TRUE(whole.equal(sums[rank]));
  });
  for (const at::Tensor& one : sums) EXPECT_TRUE(one.equal(sums[0]));
}

TEST_P(SharingHosts, RanksOfAHostThatCallDifferentThingsAreTold) {
  std::mutex mutex;
  std::vector<std::string> errors;
  run([&](int rank, const comm::CommunicatorPtr& comm) {
    const at::Tensor whole = at::empty({3 * comm->size()});
    EXPECT_FALSE(comm->stamp_next(rank == 0 ? 7 : 8));
    const std::string text = error_of([&] {
      comm->all_gather(whole, at::zeros({3}))->wait(std::chrono::seconds(5));
    });
    const std::lock_guard lock(mutex);
    errors.push_back(text);
  });
  int num_told = 0;
  for (const std::string& text : errors) {
    if (text.find("the ranks disagree") != std::string::npos) ++num_told;
  }
  EXPECT_EQ(num_told, GetParam().second);
}

}  // namespace
}  // namespace smp::shm
