#include "tests/cpp/kernels/emulated/fibers.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

// The emulation finds what it is there for.

namespace smp::kernels::emulated {
namespace {

std::string error_of_launch(dim3 blocks, dim3 threads, void (*kernel)()) {
  launch("kernel", blocks, threads, 0, nullptr, kernel);
  const char* error = take_error();
  return error == nullptr ? "" : error;
}

std::vector<int> seen;

std::vector<int> order_of_launch(unsigned seed) {
  const InOrder in_order(Order::kRandom, seed);
  seen.clear();
  EXPECT_EQ(error_of_launch(8, 128,
                            [] {
                              seen.push_back(static_cast<int>(128 * blockIdx.x +
                                                              threadIdx.x));
                            }),
            "");
  return seen;
}

TEST(Fibers, RunBlocksWarpsAndThreadsInARandomOrder) {
  const std::vector<int> order = order_of_launch(1);
  EXPECT_EQ(order_of_launch(1), order);
  EXPECT_NE(order_of_launch(2), order);
  ASSERT_EQ(order.size(), 8u * 128u);
  EXPECT_EQ(std::set<int>(order.begin(), order.end()).size(), order.size());
  std::vector<int> blocks, warps, lanes;
  for (int i = 0; i < 8; ++i) blocks.push_back(order[128 * i] / 128);
  for (int i = 0; i < 4; ++i) warps.push_back(order[32 * i] / 32);
  for (int i = 0; i < 32; ++i) lanes.push_back(order[i]);
  for (const auto* numbers : {&blocks, &warps, &lanes}) {
    EXPECT_FALSE(std::is_sorted(numbers->begin(), numbers->end()));
    EXPECT_FALSE(std::is_sorted(numbers->rbegin(), numbers->rend()));
  }
}

TEST(Fibers, RunEachThreadInEachOrder) {
  for (Order order : {Order::kForward, Order::kBackward}) {
    const InOrder in_order(order);
    seen.clear();
    EXPECT_EQ(
        error_of_launch({2, 2, 2}, {3, 2, 2},
                        [] {
                          const unsigned block =
                              blockIdx.x + 2 * blockIdx.y + 4 * blockIdx.z;
                          const unsigned thread =
                              threadIdx.x + 3 * threadIdx.y + 6 * threadIdx.z;
                          seen.push_back(static_cast<int>(12 * block + thread));
                        }),
        "");
    ASSERT_EQ(seen.size(), 96u);
    for (int i = 0; i < 96; ++i) {
      EXPECT_EQ(seen[i], order == Order::kForward ? i : 95 - i);
    }
  }
}

int sum_without_barrier, sum_with_barrier;

// Each thread adds what the next one has written.
template <bool kHasBarrier>
void sum_of_neighbours() {
  __shared__ int values[64];
  __shared__ int sum;
  values[threadIdx.x] = -1000;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kHasBarrier) __syncthreads();
  sum += values[(threadIdx.x + 1) % 64];
  __syncthreads();
  (kHasBarrier ? sum_with_barrier : sum_without_barrier) = sum;
}

TEST(Fibers, MissingBarrierShows) {
  for (Order order : {Order::kForward, Order::kBackward}) {
    const InOrder in_order(order);
    EXPECT_EQ(error_of_launch(1, 64, &sum_of_neighbours<true>), "");
    EXPECT_EQ(sum_with_barrier, 64 * 63 / 2);
    EXPECT_EQ(error_of_launch(1, 64, &sum_of_neighbours<false>), "");
    EXPECT_NE(sum_without_barrier, 64 * 63 / 2);
  }
}

// Each warp writes its number, and sums those of both, twice in one place.
template <bool kHasSecondPlace>
void sums_of_warps() {
  __shared__ unsigned values[2][2];
  const unsigned warp = threadIdx.x / 32;
  unsigned sum = 0;
  for (unsigned i = 0; i < 2; ++i) {
    unsigned* place = values[kHasSecondPlace ? i : 0];
    if (threadIdx.x % 32 == 0) place[warp] = warp + 10 * i;
    __syncthreads();
    sum += place[0] + place[1];
  }
  seen.push_back(static_cast<int>(sum));
}

// Memory that is read after a barrier may already be written for the next one.
TEST(Fibers, WarpsRunAheadOfEachOther) {
  for (Order order : {Order::kForward, Order::kBackward}) {
    const InOrder in_order(order);
    seen.clear();
    EXPECT_EQ(error_of_launch(1, 64, &sums_of_warps<true>), "");
    EXPECT_EQ(seen, std::vector<int>(64, 1 + 21));
    seen.clear();
    EXPECT_EQ(error_of_launch(1, 64, &sums_of_warps<false>), "");
    EXPECT_NE(seen, std::vector<int>(64, 1 + 21));
  }
}

double exchanged[64];
unsigned votes[64];

TEST(Fibers, WarpsExchangeAndVote) {
  EXPECT_EQ(error_of_launch(1, 64,
                            [] {
                              double value = threadIdx.x;
                              for (int mask = 16; mask > 0; mask /= 2) {
                                value +=
                                    __shfl_xor_sync(0xffffffffu, value, mask);
                              }
                              exchanged[threadIdx.x] = value;
                              votes[threadIdx.x] = __ballot_sync(
                                  0xffffffffu, threadIdx.x % 32 < 5);
                            }),
            "");
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(exchanged[i], i < 32 ? 496 : 496 + 1024);
    EXPECT_EQ(votes[i], 31u);
  }
}

TEST(Fibers, ReportABarrierThatNotAllReach) {
  const std::string ended = error_of_launch(2, 64, [] {
    if (threadIdx.x == 40) return;
    __syncthreads();
  });
  EXPECT_NE(ended.find("a barrier that not all threads reach together"),
            std::string::npos)
      << ended;
  EXPECT_NE(ended.find("thread (40, 0, 0) has ended"), std::string::npos);
  const std::string elsewhere = error_of_launch(1, 64, [] {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  });
  EXPECT_NE(elsewhere.find("thread (32, 0, 0) waits at"), std::string::npos)
      << elsewhere;
}

TEST(Fibers, ReportAnExchangeThatNotAllReach) {
  const std::string ended = error_of_launch(1, 64, [] {
    if (threadIdx.x != 3) __shfl_xor_sync(0xffffffffu, 1, 1);
  });
  EXPECT_NE(ended.find("an exchange in a warp that not all"), std::string::npos)
      << ended;
  const std::string masked =
      error_of_launch(1, 32, [] { __shfl_xor_sync(0xffffu, 1, 1); });
  EXPECT_NE(masked.find("only exchanges of whole warps"), std::string::npos);
}

TEST(Fibers, RefuseWhatADeviceRefuses) {
  const auto nothing = [] {};
  EXPECT_NE(error_of_launch(0, 32, nothing), "");
  EXPECT_NE(error_of_launch(1, 1025, nothing), "");
  EXPECT_NE(error_of_launch({1, 65536, 1}, 1, nothing), "");
  EXPECT_EQ(error_of_launch({65537, 1, 1}, 1, nothing), "");
}

}  // namespace
}  // namespace smp::kernels::emulated
