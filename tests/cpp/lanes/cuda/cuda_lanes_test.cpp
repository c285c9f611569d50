#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/cuda_runtime/fake_cuda.h"
#include "tests/cpp/cuda_runtime/torch_device.h"
#include "tests/cpp/lanes/cuda/cuda_rank.h"
#include "tests/cpp/lanes/cuda/injected_errors.h"

// The lanes of the library, in processes, over the stand-in for CUDA.

namespace smp::lanes {
namespace {

// `make test-all` takes more seeds, and each call in turn.
bool has_large_samples() {
  return std::getenv("SMP_TEST_CUDA_SAMPLES") != nullptr;
}

class CudaLanesScenarios : public ::testing::TestWithParam<Scenario> {};

TEST_P(CudaLanesScenarios, tensors_arrive_bit_by_bit_and_nothing_stays_open) {
  const uint64_t num_seeds = has_large_samples() ? 20 : 1;
  for (uint64_t seed = 1; seed <= num_seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    expect_good(run_scenario(GetParam(), seed));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaLanesScenarios,
                         ::testing::ValuesIn(all_scenarios()),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return std::isalnum(c) == 0; },
                               '_');
                           return name;
                         });

TEST(CudaLanes, a_full_ring_leaves_tensors_to_the_host_lane) {
  const fake_cuda::Machine machine;
  const CudaRankOptions options{
      .ring = {.num_slots = 2, .slot_bytes = 16 << 10}};
  expect_good(run_ranks(2, [&](Links& links) {
    const c10::Device device = begin_rank(links, options);
    CudaRank rank(links, options, device);
    if (links.rank() == 0) {
      std::vector<LaneKind> lanes;
      const auto post = [&](int index) {
        const at::Tensor host = expected_tensor(0, 1, index, 1);
        lanes.push_back(rank.post(1, host.to(device), false));
      };
      for (int index = 0; index < 3; ++index) post(index);
      rank.flush();
      links.exchange("posted");
      links.exchange("taken");
      while (rank.num_receipts() < 2) rank.turn();
      post(3);
      rank.flush();
      EXPECT_EQ(lanes, (std::vector{LaneKind::kIpc, LaneKind::kIpc,
                                    LaneKind::kHost, LaneKind::kIpc}));
      EXPECT_EQ(rank.table().counters().times_full, 1);
    } else {
      links.exchange("posted");
      while (rank.came[0].size() < 3) rank.turn();
      links.exchange("taken");
      while (rank.came[0].size() < 4) rank.turn();
      for (int index = 0; index < 4; ++index) {
        expect_bytes(rank, rank.came[0][index],
                     expected_tensor(0, 1, index, 1));
      }
    }
    links.exchange("read");
    links.say_goodbye();
  }));
}

// Returns once the tensor of a copy that was cut off raises an error: the watch
// aborts groups a moment after the fault.
void wait_until_cut_off(const memory::MarkedTensor& one) {
  try {
    while (true) {
      memory::MarkedTensor(one).use();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
  }
}

// Rank 1 dies while its copies are on their way.
void expect_death_is_told(CudaRankOptions options) {
  const fake_cuda::Machine machine;
  const auto ends = run_ranks(2, [&](Links& links) {
    const c10::Device device = begin_rank(links, options);
    std::string text;
    {
      CudaRank rank(links, options, device);
      const int other = 1 - links.rank();
      const at::Tensor host = expected_tensor(0, 1, 1, 1);
      if (links.rank() == 1) {
        const at::Tensor data = host.to(device);
        fake_cuda::freeze();
        rank.post(other, data, false);
        rank.flush();
        links.exchange("posted");
        ::_exit(9);
      }
      rank.post(other, host.to(device), false);
      rank.flush();
      links.exchange("posted");
      try {
        while (true) rank.turn();
      } catch (const PeerFailure& failure) {
        text = failure.what();
      }
      if (options.places != nullptr) {
        for (const auto& one : rank.came[other]) wait_until_cut_off(one);
      }
      rank.came.clear();
    }
    EXPECT_NE(text.find("global_rank 1"), std::string::npos) << text;
    EXPECT_EQ(fake_cuda::violations(), std::vector<std::string>{});
  });
  EXPECT_EQ(ends[1].code, 9) << ends[1].output;
  expect_good({ends[0]});
}

TEST(CudaLanes, a_peer_that_dies_is_named_and_nothing_hangs) {
  expect_death_is_told({});
}

TEST(CudaLanes, a_peer_that_dies_in_a_copy_that_meets_is_named) {
  KernelPlaces places(2, 2);
  expect_death_is_told({.has_ring = false, .places = &places});
}

int num_samples() { return has_large_samples() ? 0 : 25; }

TEST(CudaLanes, a_call_that_fails_is_one_error_and_leaks_nothing) {
  expect_good(run_with_injected_errors({}, false, num_samples()));
}

TEST(CudaLanes, a_device_that_fails_is_one_error_and_ends_the_process_well) {
  expect_good(run_with_injected_errors({}, true, num_samples()));
}

}  // namespace
}  // namespace smp::lanes
