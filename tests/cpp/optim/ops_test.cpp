#include "csrc/optim/ops.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <vector>

namespace smp::optim {
namespace {

TEST(SumOfSquares, AddsOverAllTensors) {
  const std::vector<at::Tensor> tensors = {at::full({3, 5}, 2.0, at::kFloat),
                                           at::full({7}, 3.0, at::kDouble),
                                           at::ones({0}, at::kHalf)};
  const at::Tensor sum = sum_of_squares_cpu(tensors);
  EXPECT_EQ(sum.scalar_type(), at::kDouble);
  EXPECT_EQ(sum.dim(), 0);
  EXPECT_EQ(sum.item<double>(), 15 * 4 + 7 * 9);
}

TEST(Scale, ChangesTheMemoryOfTheTensorAndItsVersion) {
  const at::Tensor tensor = at::ones({4, 3}, at::kFloat);
  const std::vector<at::Tensor> tensors = {tensor.t()};  // dense, transposed
  const auto version = tensor._version();
  scale_cpu(tensors, at::full({}, 0.5, at::kDouble));
  EXPECT_EQ(tensor.sum().item<double>(), 6);
  EXPECT_GT(tensor._version(), version);
}

TEST(Scale, RejectsTensorsWithGaps) {
  const at::Tensor tensor = at::ones({4, 3}, at::kFloat);
  const std::vector<at::Tensor> tensors = {tensor.select(1, 0)};
  EXPECT_THROW(scale_cpu(tensors, at::full({}, 0.5, at::kDouble)),
               c10::ValueError);
}

}  // namespace
}  // namespace smp::optim
