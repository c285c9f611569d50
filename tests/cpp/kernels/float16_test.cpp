#include "csrc/kernels/cpu/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace smp::kernels::cpu {
namespace {

// The value of a half from its definition.
double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  double value;
  if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else {
    value = std::ldexp(1024 + fraction, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

TEST(Half, EveryValueIsReadAndWrittenExactly) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    const double expected = half_value(half.bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(std::isnan(to_float(to_half(value))));
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << bits;
      ASSERT_EQ(to_half(value).bits, half.bits);
    }
  }
}

TEST(Half, RoundsToNearestAndTiesToEven) {
  // Between each pair of neighbours: below, at and above the middle.
  for (uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = to_float(Half{bits});
    const float high = to_float(Half{static_cast<uint16_t>(bits + 1)});
    const float middle = low + (high - low) / 2;
    const auto even = static_cast<uint16_t>(bits + (bits & 1));
    ASSERT_EQ(to_half(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(to_half(middle).bits, even);
    ASSERT_EQ(to_half(std::nextafter(middle, high)).bits, bits + 1);
    ASSERT_EQ(to_half(-middle).bits, even | 0x8000);
  }
}

TEST(Half, LargeValuesBecomeInfinite) {
  EXPECT_EQ(to_half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_half(65519.0f).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_half(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_half(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
}

TEST(BFloat16, EveryValueIsReadAndWrittenExactly) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const BFloat16 b{static_cast<uint16_t>(bits)};
    const float value = to_float(b);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(value))));
    } else {
      ASSERT_EQ(to_bfloat16(value).bits, b.bits);
    }
  }
}

TEST(BFloat16, RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(to_bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f).bits, 0x3f80);             // tie, even
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);  // above
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-7f + 0x1p-8f).bits, 0x3f82);   // tie, odd
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

}  // namespace
}  // namespace smp::kernels::cpu
