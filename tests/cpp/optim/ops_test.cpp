#include "csrc/optim/ops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "csrc/optim/chunks.h"

namespace smp::optim {
namespace {

class Threads : public ::testing::Test {
 protected:
  ~Threads() override { at::set_num_threads(before_); }
  int before_ = at::get_num_threads();
};

TEST_F(Threads, EveryChunkIsDoneOnce) {
  const std::vector<Chunk> chunks =
      cut({0, 1, kChunkElements, 0, 3 * kChunkElements + 5, 7});
  ASSERT_EQ(chunks.size(), 7);
  EXPECT_EQ(chunks[5].begin, 3 * kChunkElements);
  EXPECT_EQ(chunks[5].end, 3 * kChunkElements + 5);
  EXPECT_EQ(chunks[6].array_idx, 5);
  for (int num_threads : {1, 2, 3, 5}) {
    at::set_num_threads(num_threads);
    std::vector<int> counts(chunks.size());
    for_chunks(chunks, [&](const Chunk& chunk, size_t idx) {
      EXPECT_EQ(chunk.begin, chunks[idx].begin);
      ++counts[idx];
    });
    EXPECT_EQ(counts, std::vector<int>(chunks.size(), 1)) << num_threads;
  }
}

TEST_F(Threads, SumsDoNotDependOnThem) {
  const std::vector<at::Tensor> tensors = {at::randn({300001}, at::kFloat),
                                           at::randn({77}, at::kDouble),
                                           at::randn({200000}, at::kBFloat16)};
  at::set_num_threads(1);
  const double sum = sum_of_squares(tensors).item<double>();
  EXPECT_GT(sum, 400000);
  for (int num_threads : {2, 3, 7}) {
    at::set_num_threads(num_threads);
    EXPECT_EQ(sum_of_squares(tensors).item<double>(), sum);
  }
}

TEST(SumOfSquares, AddsOverAllTensors) {
  const std::vector<at::Tensor> tensors = {at::full({3, 5}, 2.0, at::kFloat),
                                           at::full({7}, 3.0, at::kDouble),
                                           at::ones({0}, at::kHalf)};
  const at::Tensor sum = sum_of_squares(tensors);
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
  EXPECT_EQ(sum.dim(), 0);
  EXPECT_EQ(sum.item<double>(), 15 * 4 + 7 * 9);
  const at::Tensor sums = sums_of_squares(tensors);
  EXPECT_EQ(sums.sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(sums[1].item<double>(), 7 * 9);
  EXPECT_EQ(sums[2].item<double>(), 0);
}

TEST(FoundNonfinite, SeesOneElement) {
  std::vector<at::Tensor> tensors = {at::ones({5}, at::kFloat),
                                     at::ones({200000}, at::kHalf)};
  EXPECT_EQ(found_nonfinite(tensors).item<double>(), 0);
  tensors[1][199999] = std::numeric_limits<double>::infinity();
  EXPECT_EQ(found_nonfinite(tensors).item<double>(), 1);
  tensors[1][199999] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(found_nonfinite(tensors).item<double>(), 1);
}

TEST(Clip, GivesDivisorNormAndWhetherItIsFinite) {
  const auto clip = [](double squares, double max_norm, double grad_scale) {
    const auto [divisor, norm, found_inf] =
        clip_divisor(at::full({}, squares, at::kDouble), max_norm,
                     at::full({}, grad_scale, at::kDouble), 1e-6);
    return std::vector<double>{divisor.item<double>(), norm.item<double>(),
                               found_inf.item<double>()};
  };
  constexpr double kInf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(clip(0.25, 1, 1), (std::vector<double>{1, 0.5, 0}));
  EXPECT_EQ(clip(16, 1, 4), (std::vector<double>{4 * (1 + 1e-6), 1, 0}));
  EXPECT_EQ(clip(64, 1, 4)[1], 2);
  EXPECT_DOUBLE_EQ(clip(64, 1, 4)[0], 8 + 4e-6);
  EXPECT_EQ(clip(4, 0, 1), (std::vector<double>{kInf, 2, 0}));
  EXPECT_EQ(clip(kInf, 1, 4), (std::vector<double>{kInf, kInf, 1}));
  EXPECT_THROW(clip(1, -1, 1), c10::ValueError);
  EXPECT_THROW(clip(1, std::numeric_limits<double>::quiet_NaN(), 1),
               c10::ValueError);
}

}  // namespace
}  // namespace smp::optim
