#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "csrc/comm/mpi_communicator.h"
#include "csrc/common/check.h"
#include "tests/cpp/comm/communicator_suite.h"
#include "tests/cpp/comm/local_world.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong = std::chrono::seconds(20);

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class LocalWorld : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, LocalWorld, testing::Values(1, 2, 3, 4));

TEST_P(LocalWorld, KeepsEveryPromiseOfACommunicator) {
  for (const suite::Check& one : suite::all_checks()) {
    SCOPED_TRACE(one.name);
    EXPECT_EQ(error_of([&] {
                run_ranks(GetParam(), [&](int, const CommunicatorPtr& comm) {
                  one.check(*comm);
                });
              }),
              "no error");
  }
}

TEST_P(LocalWorld, KeepsEveryPromiseOnOneWorldAfterAnother) {
  run_ranks(GetParam(), [&](int, const CommunicatorPtr& comm) {
    for (const suite::Check& one : suite::all_checks()) one.check(*comm);
  });
}

TEST_P(LocalWorld, AbortEndsWaits) {
  run_ranks(GetParam(), [](int, const CommunicatorPtr& comm) {
    suite::check_abort_ends_waits(*comm, /*with_collective=*/true);
  });
}

TEST(LocalWorldErrors, ReceiverIsToldBothSizes) {
  run_ranks(2, [](int global_rank, const CommunicatorPtr& comm) {
    if (global_rank == 0) {
      comm->send(at::zeros({2, 3}), 1, 0)->wait(kLong);
      return;
    }
    const WorkPtr work = comm->recv(at::zeros({7}), 0, 0);
    const std::string text = error_of([&] { work->wait(kLong); });
    EXPECT_TRUE(contains(text, "group rank 0 sent Float[2, 3]")) << text;
    EXPECT_TRUE(contains(text, "group rank 1 receives Float[7]")) << text;
  });
}

TEST(LocalWorldErrors, ReceiverIsToldBothDtypes) {
  run_ranks(2, [](int global_rank, const CommunicatorPtr& comm) {
    if (global_rank == 0) {
      comm->send(at::zeros({3}, at::TensorOptions(at::kLong)), 1, 0);
      return;
    }
    const WorkPtr work =
        comm->recv(at::zeros({3}, at::TensorOptions(at::kDouble)), 0, 0);
    const std::string text = error_of([&] { work->wait(kLong); });
    EXPECT_TRUE(contains(text, "sent Long[3]")) << text;
    EXPECT_TRUE(contains(text, "receives Double[3]")) << text;
  });
}

TEST(LocalWorldErrors, EveryRankIsToldThatCollectivesDiffer) {
  run_ranks(3, [](int global_rank, const CommunicatorPtr& comm) {
    const WorkPtr sizes =
        comm->all_reduce(at::zeros({global_rank == 2 ? 4 : 3}), ReduceOp::kSum);
    std::string text = error_of([&] { sizes->wait(kLong); });
    EXPECT_TRUE(contains(text, "Float[3]")) << text;
    EXPECT_TRUE(contains(text, "Float[4]")) << text;

    const WorkPtr kinds =
        global_rank == 1 ? comm->barrier() : comm->broadcast(at::zeros({3}), 0);
    text = error_of([&] { kinds->wait(kLong); });
    EXPECT_TRUE(contains(text, "broadcast(root=0)")) << text;
    EXPECT_TRUE(contains(text, "barrier")) << text;
    comm->barrier()->wait(kLong);
  });
}

TEST(LocalWorldErrors, ASendCopiesItsTensor) {
  run_ranks(2, [](int global_rank, const CommunicatorPtr& comm) {
    if (global_rank == 0) {
      at::Tensor tensor = at::full({3}, 1.0);
      comm->send(tensor, 1, 0);
      tensor.fill_(2.0);
      comm->barrier()->wait(kLong);
      return;
    }
    comm->barrier()->wait(kLong);
    const at::Tensor got = at::zeros({3});
    comm->recv(got, 0, 0)->wait(kLong);
    EXPECT_TRUE(got.eq(1.0).all().item<bool>()) << got;
  });
}

TEST(RunRanks, FirstExceptionNamesItsRankAndWakesTheOthers) {
  const std::string text = error_of([] {
    run_ranks(3, [](int global_rank, const CommunicatorPtr& comm) {
      if (global_rank == 1) throw std::runtime_error("planned");
      comm->barrier()->wait(kLong);
    });
  });
  EXPECT_EQ(text, "rank 1: planned");
}

TEST(RunRanks, DeadlineEndsRanksThatWait) {
  const std::string text = error_of([] {
    run_ranks(
        2,
        [](int global_rank, const CommunicatorPtr& comm) {
          if (global_rank == 0) comm->barrier()->wait(kLong);
        },
        milliseconds(100));
  });
  EXPECT_EQ(text, "1 ranks did not end within 100 ms");
}

TEST(NoMpi, MakersSayHowToGetIt) {
  if (mpi_available()) GTEST_SKIP() << "built with MPI";
  EXPECT_TRUE(contains(error_of([] { make_mpi_world(); }), "Open MPI"));
  EXPECT_TRUE(contains(error_of([] { make_mpi_group({0}); }), "Open MPI"));
}

}  // namespace
}  // namespace smp::comm
