#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "csrc/kernels/cuda/update.cuh"
#include "csrc/kernels/loss_scale.h"
#include "tests/cpp/kernels/elements.h"
#include "tests/cpp/kernels/emulated/emulated.h"

// Lists of more arrays, and of more chunks, than one launch takes.

namespace smp::kernels::emulated {
namespace {

constexpr int64_t kManyArrays = 1100;  // more than any list holds

TEST(EmulatedLists, ManyArraysAreReducedAndScaledEach) {
  std::vector<std::vector<float>> data;
  std::vector<Array> arrays;
  for (int64_t i = 0; i < kManyArrays; ++i) {
    data.emplace_back(i % 7, static_cast<float>(i));
  }
  for (auto& d : data) {
    arrays.push_back({d.data(), static_cast<int64_t>(d.size()), Dtype::kFloat});
  }
  const double factor = 2;
  expect_launched(cuda::scale(arrays.data(), kManyArrays, &factor, nullptr));
  const auto squares =
      results(cuda::sums_of_squares, arrays.data(), kManyArrays);
  const auto maxima = results(cuda::max_abs, arrays.data(), kManyArrays);
  for (int64_t i = 0; i < kManyArrays; ++i) {
    const double value = 2.0 * static_cast<double>(i);
    EXPECT_EQ(squares[i], value * value * static_cast<double>(i % 7));
    EXPECT_EQ(maxima[i], i % 7 == 0 ? 0 : value);
  }
}

TEST(EmulatedLists, ManyParametersHaveOneStepEach) {
  std::vector<std::array<float, 5>> numbers(kManyArrays);
  std::vector<UpdateArrays> arrays(kManyArrays);
  for (int64_t i = 0; i < kManyArrays; ++i) {
    auto& n = numbers[i];
    n = {static_cast<float>(i), 1, 0, 0, 0};
    arrays[i].param = &n[0];
    arrays[i].grad = &n[1];
    arrays[i].exp_avg = &n[2];
    arrays[i].exp_avg_sq = &n[3];
    arrays[i].step = &n[4];
    arrays[i].num_elements = 1;
  }
  const double rate = 0.5;
  expect_launched(cuda::adam(arrays.data(), kManyArrays,
                             {0.9, 0.99, 0, 0, true, true, true},
                             {&rate, nullptr, nullptr}, nullptr));
  for (int64_t i = 0; i < kManyArrays; ++i) {
    EXPECT_NEAR(numbers[i][0], static_cast<float>(i) - 0.5f, 1e-3) << i;
    EXPECT_EQ(numbers[i][4], 1);
  }
}

// Sizes only: no memory is touched.
TEST(EmulatedLists, EachChunkIsInOneLaunch) {
  const std::vector<int64_t> sizes = {
      0, 1, cuda::kChunkElements, 5000 * int64_t{cuda::kChunkElements} + 1, 7};
  std::set<std::pair<int64_t, int64_t>> seen;  // array, chunk
  int num_launches = 0;
  const char* error = cuda::for_each_chunk_list<cuda::UpdateList>(
      static_cast<int64_t>(sizes.size()),
      [&](int64_t i, cuda::UpdateItem& item) {
        item = {};
        item.num_elements = sizes[i];
        item.idx = static_cast<int32_t>(i);
        return true;
      },
      [&](const cuda::UpdateList& list, int num_blocks) -> const char* {
        ++num_launches;
        for (int b = 0; b < num_blocks; ++b) {
          const auto& item = list.items[list.array_idxs[b]];
          EXPECT_EQ(item.num_elements, sizes[item.idx]);
          EXPECT_TRUE(seen.emplace(item.idx, list.chunk_idxs[b]).second);
        }
        return nullptr;
      });
  EXPECT_EQ(error, nullptr);
  EXPECT_EQ(seen.size(), 1 + 1 + 5001 + 1);
  EXPECT_GT(num_launches, 1);
}

TEST(EmulatedLossScale, MovesAsOnTheHost) {
  LossScaleRule rule;
  rule.window = 2;
  LossScaleState state = {1024, 0, -1, 1}, want = state;
  for (double found_inf : {0.0, 0.0, 0.0, 1.0, 1.0}) {
    expect_launched(cuda::move_loss_scale(rule, &found_inf, &state, nullptr));
    move_loss_scale(rule, found_inf != 0, &want);
    EXPECT_EQ(state.scale, want.scale);
    EXPECT_EQ(state.iteration, want.iteration);
    EXPECT_EQ(state.hysteresis, want.hysteresis);
  }
  EXPECT_NE(state.scale, 1024);
}

}  // namespace
}  // namespace smp::kernels::emulated
