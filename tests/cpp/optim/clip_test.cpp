#include "csrc/optim/clip.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "csrc/common/check.h"

namespace smp::optim {
namespace {

TEST(ClipCoefficient, ScalesLargeNormsOnly) {
  EXPECT_DOUBLE_EQ(clip_coefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(clip_coefficient(0.5, 1), 1);
  EXPECT_EQ(clip_coefficient(0, 1), 1);
  EXPECT_EQ(clip_coefficient(3, 0), 0);
}

TEST(ClipCoefficient, InfiniteNormGivesZeroAndNanStaysVisible) {
  EXPECT_EQ(clip_coefficient(std::numeric_limits<double>::infinity(), 1), 0);
  EXPECT_TRUE(std::isnan(clip_coefficient(std::nan(""), 1)));
}

TEST(ClipCoefficient, RejectsNegativeLimits) {
  EXPECT_THROW(clip_coefficient(1, -1), ValueError);
  EXPECT_THROW(clip_coefficient(1, std::nan("")), ValueError);
}

}  // namespace
}  // namespace smp::optim
