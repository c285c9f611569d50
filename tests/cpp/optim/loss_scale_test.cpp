#include "csrc/kernels/loss_scale.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/optim/ops.h"

namespace smp::optim {
namespace {

// Scales after each iteration; 'x' is an overflow. The rule on long and random
// histories is in tests/unit/test_loss_scaler.py.
std::vector<double> scales(const std::string& history, double init_scale,
                           const kernels::LossScaleRule& rule) {
  const at::Tensor state = at::full({4}, 0, at::kDouble);
  auto* numbers = state.mutable_data_ptr<double>();
  numbers[0] = init_scale;
  numbers[2] = -1;
  numbers[3] = static_cast<double>(rule.delayed_shift);
  std::vector<double> result;
  for (const char letter : history) {
    const auto version = state._version();
    update_loss_scale_(state, at::full({}, letter == 'x' ? 1 : 0, at::kFloat),
                       rule.factor, rule.window, rule.min_scale,
                       rule.delayed_shift, rule.gives_back);
    EXPECT_GT(state._version(), version);
    result.push_back(numbers[0]);
  }
  EXPECT_EQ(numbers[1], history.size());
  return result;
}

TEST(LossScale, FallsToItsMinimumAndRises) {
  using Scales = std::vector<double>;
  EXPECT_EQ(scales("xxx", 4, {2, 1000, 2}), (Scales{2, 2, 2}));
  EXPECT_EQ(scales("x...x", 8, {2, 2}), (Scales{4, 4, 4, 8, 4}));
  EXPECT_EQ(scales("x.x.x", 16, {2, 1000, 1, 2}), (Scales{16, 16, 8, 8, 4}));
  EXPECT_EQ(scales("x.x.xx", 16, {2, 1000, 1, 2, true}),
            (Scales{16, 16, 16, 16, 16, 8}));
}

TEST(LossScale, RefusesOtherStates) {
  const at::Tensor found = at::full({}, 0, at::kDouble);
  const auto update = [&](const at::Tensor& state, const at::Tensor& found_inf,
                          int64_t window) {
    update_loss_scale_(state, found_inf, 2, window, 1, 1, false);
  };
  const at::Tensor state = at::full({4}, 1, at::kDouble);
  EXPECT_THROW(update(at::full({4}, 1, at::kFloat), found, 1), c10::ValueError);
  EXPECT_THROW(update(at::full({3}, 1, at::kDouble), found, 1),
               c10::ValueError);
  EXPECT_THROW(update(state, at::full({2}, 1, at::kFloat), 1), c10::ValueError);
  EXPECT_THROW(update(state, found, 0), c10::ValueError);
}

}  // namespace
}  // namespace smp::optim
