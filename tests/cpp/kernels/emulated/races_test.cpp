#include "tests/cpp/kernels/emulated/races.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

// Races are reported with kernel, address and threads, in each order of
// threads; accesses that a barrier orders are not. This file is compiled as
// kernels are, with calls before each access.

namespace smp::kernels::emulated {
namespace {

template <typename Kernel>
std::string error_of_launch(dim3 blocks, dim3 threads, Kernel kernel) {
  launch("kernel<64>", blocks, threads, 0, nullptr, kernel);
  const char* error = take_error();
  return error == nullptr ? "" : error;
}

// Calls test(error) with the error of a launch in each order.
template <typename Kernel, typename Test>
void in_each_order(dim3 blocks, dim3 threads, Kernel kernel, Test&& test) {
  for (Order order : {Order::kForward, Order::kBackward, Order::kRandom}) {
    SCOPED_TRACE("order " + std::to_string(static_cast<int>(order)));
    const InOrder in_order(order);
    test(error_of_launch(blocks, threads, kernel));
  }
}

template <typename Kernel>
void expect_none(dim3 blocks, dim3 threads, Kernel kernel) {
  in_each_order(blocks, threads, kernel,
                [](const std::string& error) { EXPECT_EQ(error, ""); });
}

template <typename Kernel>
void expect_error(dim3 blocks, dim3 threads, Kernel kernel,
                  const std::string& text) {
  in_each_order(blocks, threads, kernel, [&](const std::string& error) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
  });
}

int neighbour[3 * 64];
uint16_t halves[64];

// Each thread reads what the next one has written.
template <bool kHasBarrier>
void read_neighbour() {
  static int values[64];
  static const Shared place("values", values, sizeof values);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  values[threadIdx.x] += 1;
  if (kHasBarrier) __syncthreads();
  neighbour[64 * blockIdx.x + threadIdx.x] = values[threadIdx.x ^ 1];
}

TEST(Races, NamesKernelAddressAndThreads) {
  const InOrder in_order(Order::kForward);
  const std::string error = error_of_launch(1, 64, &read_neighbour<false>);
  EXPECT_EQ(error.find("kernel<64>: block (0, 0, 0), thread (1, 0, 0) writes "
                       "shared values + 4, which thread (0, 0, 0) reads: a "
                       "race, no barrier between since that at "),
            0)
      << error;
  EXPECT_NE(error.find("races_test.cpp:"), std::string::npos) << error;
}

TEST(Races, BarrierOrders) {
  expect_none(3, 64, &read_neighbour<true>);
  expect_error(3, 64, &read_neighbour<false>, "a race");
}

TEST(Races, TwoWritesAreARace) {
  expect_error(
      1, 64, [] { neighbour[threadIdx.x % 63] = 1; },
      "0, 0) writes: a race, no barrier between");
}

// The first reader of an address writes it, too.
TEST(Races, EachReaderCounts) {
  static int value;
  value = 0;
  const auto kernel = [](unsigned writer) {
    return [writer] {
      const int old = value;
      __shfl_xor_sync(0xffffffffu, old, 1);
      if (threadIdx.x == writer) value = old + 1;
    };
  };
  expect_error(1, 32, kernel(0), "a race");
  expect_error(1, 32, kernel(31), "a race");
}

// An exchange orders registers only.
TEST(Races, ExchangeOrdersNoMemory) {
  expect_error(
      1, 32,
      [] {
        neighbour[threadIdx.x] = 1;
        __shfl_xor_sync(0xffffffffu, 1, 1);
        neighbour[32 + threadIdx.x] = neighbour[threadIdx.x ^ 1];
      },
      "a race");
}

TEST(Races, BlocksAreNotOrdered) {
  expect_error(
      3, 1, [] { neighbour[0] = static_cast<int>(blockIdx.x); },
      "in another block: a race");
  expect_none(3, 1, [] { neighbour[blockIdx.x] = 1; });
}

TEST(Races, SharedMemoryIsWrittenFirst) {
  static int values[2];
  static const Shared place("values", values, sizeof values);
  const auto kernel = [] {
    if (blockIdx.x == 0) values[1] = 5;
    neighbour[blockIdx.x] = values[1];
  };
  expect_none(1, 1, kernel);
  expect_error(2, 1, kernel,
               "block (1, 0, 0), thread (0, 0, 0) reads shared values + 4, "
               "which no thread of the block has written");
}

TEST(Races, NeighbouringElementsAreApart) {
  expect_none(1, 64, [] { halves[threadIdx.x] = 1; });
}

}  // namespace
}  // namespace smp::kernels::emulated
