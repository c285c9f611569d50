#include "csrc/shm/shared_collectives.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/local_world.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::shm {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPatience = std::chrono::seconds(20);

// `run_ranks` whose communicators share memory.
void run_sharing(int size,
                 const std::function<void(int, comm::CommunicatorPtr)>& body) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<comm::CommunicatorPtr> inner(size);
  std::vector<comm::CommunicatorPtr> shared;
  int num_here = 0;
  comm::run_ranks(size, [&](int rank, const comm::CommunicatorPtr& comm) {
    {
      std::unique_lock lock(mutex);
      inner[rank] = comm;
      if (++num_here == size) shared = share_collectives_locally(inner);
      changed.notify_all();
      changed.wait(lock, [&] { return !shared.empty(); });
    }
    body(rank, shared[rank]);
  });
}

class SharedCollectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, SharedCollectives, testing::Values(1, 2, 3, 4));

TEST_P(SharedCollectives, KeepEveryPromiseOfACommunicator) {
  run_sharing(GetParam(), [&](int, const comm::CommunicatorPtr& comm) {
    for (const comm::suite::Check& one : comm::suite::all_checks())
      one.check(*comm);
  });
}

TEST_P(SharedCollectives, AbortEndsWaits) {
  run_sharing(GetParam(), [](int, const comm::CommunicatorPtr& comm) {
    comm::suite::check_abort_ends_waits(*comm, /*with_collective=*/true);
  });
}

// More bytes than any slot, and not a multiple of anything.
TEST_P(SharedCollectives, LongTensorsPassInManyChunks) {
  const int size = GetParam();
  const int64_t n = 300'001;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    std::vector<at::Tensor> inputs;
    for (int i = 0; i < size; ++i) {
      inputs.push_back(at::randn({size * n}, at::kDouble).to(dtype));
    }
    at::Tensor sum = inputs[0].to(at::kDouble).clone();
    for (int i = 1; i < size; ++i) sum.add_(inputs[i]);
    run_sharing(size, [&](int rank, const comm::CommunicatorPtr& comm) {
      const at::Tensor reduced = inputs[rank].clone();
      comm->all_reduce(reduced, comm::ReduceOp::kSum)->wait(kPatience);
      const double tolerance = dtype == at::kBFloat16 ? 1e-2
                               : dtype == at::kFloat  ? 1e-5
                                                      : 1e-14;
      EXPECT_TRUE(
          at::allclose(reduced.to(at::kDouble), sum, tolerance, tolerance));
      const at::Tensor part = at::empty({n}, at::TensorOptions(dtype));
      comm->reduce_scatter(part, inputs[rank], comm::ReduceOp::kSum)
          ->wait(kPatience);
      // The order of a sum does not depend on the way it is taken.
      EXPECT_TRUE(part.equal(reduced.narrow(0, rank * n, n)));
      const at::Tensor whole = at::empty({size * n}, at::TensorOptions(dtype));
      comm->all_gather(whole, part)->wait(kPatience);
      EXPECT_TRUE(whole.equal(reduced));
      comm->all_to_all(whole, inputs[rank])->wait(kPatience);
      for (int i = 0; i < size; ++i) {
        EXPECT_TRUE(
            whole.narrow(0, i * n, n).equal(inputs[i].narrow(0, rank * n, n)));
      }
      at::Tensor sent = inputs[rank].clone();
      comm->broadcast(sent, size - 1)->wait(kPatience);
      EXPECT_TRUE(sent.equal(inputs[size - 1]));
    });
  }
}

TEST(SharedCollectivesErrors, EveryRankIsToldThatCallsDifferAndCanGoOn) {
  run_sharing(3, [](int rank, const comm::CommunicatorPtr& comm) {
    comm::WorkPtr work =
        comm->all_reduce(at::zeros({rank == 2 ? 4 : 3}), comm::ReduceOp::kSum);
    EXPECT_THROW(work->wait(kPatience), comm::Disagreement);
    const std::string text = error_of([&] { work->wait(kPatience); });
    EXPECT_NE(text.find("12 bytes of Float"), std::string::npos) << text;
    EXPECT_NE(text.find("16 bytes of Float"), std::string::npos) << text;
    work = rank == 1 ? comm->barrier() : comm->broadcast(at::zeros({3}), 0);
    EXPECT_THROW(work->wait(kPatience), comm::Disagreement);
    EXPECT_TRUE(comm->stamp_next(rank / 2));
    work = comm->barrier();
    EXPECT_THROW(work->wait(kPatience), comm::Disagreement);
    const at::Tensor one = at::full({3}, 1.0);
    comm->all_reduce(one, comm::ReduceOp::kSum)->wait(kPatience);
    EXPECT_TRUE(one.eq(3.0).all().item<bool>());
  });
}

TEST(SharedCollectives, RanksThatAreLateAreSleptFor) {
  run_sharing(2, [](int rank, const comm::CommunicatorPtr& comm) {
    for (int i = 0; i < 5; ++i) {
      if (rank == i % 2) std::this_thread::sleep_for(milliseconds(30));
      const at::Tensor x = at::full({5}, i);
      comm->all_reduce(x, comm::ReduceOp::kSum)->wait(kPatience);
      EXPECT_TRUE(x.eq(2 * i).all().item<bool>());
    }
  });
}

TEST(SharedCollectives, TwoThreadsOfARankMayWait) {
  run_sharing(2, [](int rank, const comm::CommunicatorPtr& comm) {
    const at::Tensor a = at::full({5}, 1.0);
    const at::Tensor b = at::full({5}, 2.0);
    const comm::WorkPtr first = comm->all_reduce(a, comm::ReduceOp::kSum);
    const comm::WorkPtr second = comm->all_reduce(b, comm::ReduceOp::kSum);
    std::thread other([&] { second->wait(kPatience); });
    if (rank == 1) std::this_thread::sleep_for(milliseconds(20));
    first->wait(kPatience);
    other.join();
    EXPECT_TRUE(a.eq(2).all().item<bool>() && b.eq(4).all().item<bool>());
  });
}

TEST(ShareCollectives, OverAWorldOfThreadsOpensTheMemoryOfAll) {
  comm::run_ranks(3, [](int rank, const comm::CommunicatorPtr& inner) {
    const comm::CommunicatorPtr comm = share_collectives(inner, {}, {});
    EXPECT_NE(comm, inner);
    const at::Tensor x = at::full({100'000}, rank);
    comm->all_reduce(x, comm::ReduceOp::kSum)->wait(kPatience);
    EXPECT_TRUE(x.eq(3).all().item<bool>());
    inner->barrier()->wait(kPatience);
  });
}

TEST(ShareCollectives, OneRankThatDoesNotWantToLeavesAllWithTheInner) {
  comm::run_ranks(3, [](int rank, const comm::CommunicatorPtr& inner) {
    EXPECT_EQ(share_collectives(inner, {.enabled = rank != 1}, {}), inner);
    EXPECT_EQ(
        share_collectives(inner, {.machine = rank == 0 ? "here" : "there"}, {}),
        inner);
  });
}

}  // namespace
}  // namespace smp::shm
