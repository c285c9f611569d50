#include "csrc/kernels/compact_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "tests/cpp/kernels/compact_data.h"
#include "tests/cpp/kernels/implementations.h"

// Formats and their roundings, and Adam on them: every table that this
// processor can run against loops in double.

namespace smp::kernels {
namespace {

// ---- Roundings

const float kValues[] = {0.0f,      1.0f,   -1.0f,  1.00390625f, 3.1415927f,
                         -2.71828f, 1e-30f, 6e-39f, -1.17e-38f,  65504.7f};

TEST(StochasticRounding, HasTheValueAsMeanOverAllDraws) {
  for (float value : kValues) {
    double wide = 0, split = 0;
    for (uint32_t k = 0; k < 65536; ++k) {
      wide +=
          float_of(rounded_bfloat16<uint32_t>(bits_of(value), k << 16) << 16);
    }
    for (uint32_t k = 0; k < 256; ++k) {
      const uint32_t both = split_bfloat16<uint32_t>(bits_of(value), k << 24);
      split += float_of(rejoined_bfloat16<uint32_t>(both >> 8, both & 0xffu));
    }
    EXPECT_EQ(wide / 65536, value);
    EXPECT_EQ(split / 256, value);
  }
}

TEST(StochasticRounding, OfCodesHasTheValueAsMeanOverAllDraws) {
  for (float y : {0.0f, 0.01f, 0.3f, 1.0f, 2.7f, 100.0f, 246.5f}) {
    constexpr uint32_t kDraws = 1u << kCodeShift;
    double sum = 0;
    const float shifted = 1 + y;
    for (uint32_t k = 0; k < kDraws; ++k) {
      const uint32_t code = code_of<uint32_t>(
          bits_of(shifted), k << (32 - kCodeShift), kSecondTopCode);
      sum += float_of(bits_of_code<uint32_t>(code)) - 1.0;
    }
    EXPECT_NEAR(sum / kDraws, shifted - 1.0, 1e-12) << y;
  }
}

TEST(Rounding, ToNearestIsOffByHalfAUnitAtMost) {
  for (float value : kValues) {
    const float rounded =
        float_of(rounded_bfloat16<uint32_t>(bits_of(value), kNearest) << 16);
    const float unit = std::max(std::ldexp(std::abs(value), -7), 1e-40f);
    EXPECT_LE(std::abs(rounded - value), unit / 2 * 1.01f) << value;
  }
}

TEST(Rounding, KeepsNaNAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  for (uint32_t draw : {0u, kNearest, 0xffffffffu}) {
    for (float value : {inf, -inf}) {
      const uint32_t bits = bits_of(value);
      EXPECT_EQ(rounded_bfloat16<uint32_t>(bits, draw) << 16, bits);
      const uint32_t both = split_bfloat16<uint32_t>(bits, draw);
      EXPECT_EQ(rejoined_bfloat16<uint32_t>(both >> 8, both & 0xffu), bits);
    }
    const uint32_t nan = 0x7fffffffu;  // the largest, which must not overflow
    EXPECT_TRUE(
        std::isnan(float_of(rounded_bfloat16<uint32_t>(nan, draw) << 16)));
    const uint32_t both = split_bfloat16<uint32_t>(nan, draw);
    EXPECT_TRUE(std::isnan(
        float_of(rejoined_bfloat16<uint32_t>(both >> 8, both & 0xffu))));
  }
}

TEST(Split, HasTheNearestBFloat16InFront) {
  std::mt19937 random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint32_t bits = random() & 0xffffff00u;  // 24 bits: nothing is cut
    if ((bits & 0x7f800000u) == 0x7f800000u) continue;
    const uint32_t both = split_bfloat16<uint32_t>(bits, kNearest);
    ASSERT_EQ(rejoined_bfloat16<uint32_t>(both >> 8, both & 0xffu), bits);
    const double value = float_of(bits);
    const double high = float_of(both >> 8 << 16);
    const double other = float_of(cpu::to_bfloat16(float_of(bits)).bits << 16);
    ASSERT_EQ(std::abs(high - value), std::abs(other - value));
  }
}

TEST(Draws, AreUniformAndIndependentOverElementsAndOverSteps) {
  constexpr int kElements = 1000, kSteps = 100, kRoundings = 3;
  double sum = 0, squares = 0, steps = 0, elements = 0, roundings = 0;
  std::vector<double> before(kElements);
  for (int step = 1; step <= kSteps; ++step) {
    const DrawKeys keys = draw_keys(7, static_cast<float>(step));
    double last = 0;
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t hash = column_hash<uint32_t>(i, keys.column);
      const RowKey all[] = {keys.first_moment, keys.second_moment,
                            keys.parameter};
      double u[kRoundings];
      for (int k = 0; k < kRoundings; ++k) {
        u[k] = draw<uint32_t>(hash, all[k]) * 0x1p-32 - 0.5;
        sum += u[k];
        squares += u[k] * u[k];
      }
      steps += u[0] * before[i];
      elements += u[0] * last;
      roundings += u[0] * u[1] + u[1] * u[2] + u[0] * u[2];
      before[i] = last = u[0];
    }
  }
  // The variances of u, u^2 and of a product are 1/12, 1/180 and 1/144.
  constexpr double kNum = kElements * kSteps;
  EXPECT_NEAR(sum, 0, 5 * std::sqrt(kRoundings * kNum / 12));
  EXPECT_NEAR(squares, kRoundings * kNum / 12,
              5 * std::sqrt(kRoundings * kNum / 180));
  for (double products : {steps, elements}) {
    EXPECT_NEAR(products, 0, 5 * std::sqrt(kNum / 144));
  }
  EXPECT_NEAR(roundings, 0, 5 * std::sqrt(3 * kNum / 144));
}

// ---- The update

constexpr int64_t kSize = 1000;

class CompactAdam : public ::testing::Test {
 protected:
  static constexpr double kRate = 0.02, kDivisor = 2.5;
  const AdamOptions options_{0.9, 0.99, 1e-3, 0.1, true, true, true};

  // test(table, format, is_stochastic)
  template <typename Test>
  void for_all(Test&& test) {
    for (auto* table = implementations(); *table != nullptr; ++table) {
      for (const Format& format : kFormats) {
        for (bool is_stochastic : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << "moments " << static_cast<int>(format.moments)
                       << ", half " << format.is_half << ", residue "
                       << format.has_residue << ", draws " << is_stochastic);
          test(**table, format, is_stochastic);
        }
      }
    }
  }

  void step(const cpu::FusedTable& table, CompactData& data, bool is_stochastic,
            int64_t begin, int64_t end) const {
    table.adam_compact(data.arrays(is_stochastic),
                       adam_factors(options_, data.step, kDivisor), kRate,
                       begin, end);
  }
};

TEST_F(CompactAdam, IsOffByTheUnitsOfItsFormatAtMost) {
  for_all([&](const cpu::FusedTable& table, const Format& format,
              bool is_stochastic) {
    const double units = is_stochastic ? 1.0001 : 0.5001;
    // 100: the first block has 156 elements, the last one 76.
    CompactData data(format, 100 + 5 * kMomentBlock, kSize);
    for (int update = 1; update <= 4; ++update) {
      const CompactData before = data;
      data.step = static_cast<float>(update);
      step(table, data, is_stochastic, 0, kSize);
      for (int64_t i = 0; i < kSize; ++i) {
        const double p = before.param(i), g = before.gradient(i) / kDivisor;
        const double m =
            0.9 * std::get<0>(before.moment(false, i)) + (1 - 0.9) * g;
        const double v =
            0.99 * std::get<0>(before.moment(true, i)) + (1 - 0.99) * g * g;
        const double u =
            m / (1 - std::pow(0.9, update)) /
                (std::sqrt(v / (1 - std::pow(0.99, update))) + 1e-3) +
            0.1 * p;
        const double want = p - kRate * u;
        const auto [got_m, unit_m] = data.moment(false, i);
        const auto [got_v, unit_v] = data.moment(true, i);
        ASSERT_NEAR(got_m, m, units * unit_m + 1e-6 * std::abs(m)) << i;
        // A value below the smallest code is raised to it, and not 0.
        const double units_v = v < unit_v ? 1 : units;
        ASSERT_NEAR(got_v, v, units_v * unit_v + 1e-6 * v) << i;
        ASSERT_TRUE(got_v > 0 || v == 0) << i;
        ASSERT_NEAR(data.param(i), want,
                    units * data.param_unit(want) * 1.01 + 2e-6)
            << i;
        if (!format.is_half) {
          const auto rounded = static_cast<float>(data.param(i));
          ASSERT_EQ(data.copy(i), cpu::to_bfloat16(rounded).bits);
        }
      }
    }
  });
}

TEST_F(CompactAdam, HasTheSameBitsInPartsThatEndBetweenBlocks) {
  for_all([&](const cpu::FusedTable& table, const Format& format,
              bool is_stochastic) {
    CompactData whole(format, 0, kSize);
    CompactData first(format, 0, 512), second(format, 512, kSize - 512, 512);
    for (int update = 1; update <= 3; ++update) {
      whole.step = first.step = second.step = static_cast<float>(update);
      step(table, whole, is_stochastic, 256, kSize);  // as by two threads
      step(table, whole, is_stochastic, 0, 256);
      step(table, first, is_stochastic, 0, 512);
      step(table, second, is_stochastic, 0, kSize - 512);
    }
    for (int64_t i = 0; i < kSize; ++i) {
      const CompactData& part = i < 512 ? first : second;
      const int64_t j = i < 512 ? i : i - 512;
      ASSERT_EQ(whole.param(i), part.param(j)) << i;
      ASSERT_EQ(whole.moment(false, i), part.moment(false, j)) << i;
      ASSERT_EQ(whole.moment(true, i), part.moment(true, j)) << i;
    }
  });
}

TEST_F(CompactAdam, LeavesWhatIsOutsideOfTheRange) {
  for_all([&](const cpu::FusedTable& table, const Format& format,
              bool is_stochastic) {
    CompactData data(format, 0, kSize);
    const CompactData before = data;
    step(table, data, is_stochastic, 256, 512);
    int64_t num_changed = 0;
    for (int64_t i = 0; i < kSize; ++i) {
      const bool is_same = data.moment(true, i) == before.moment(true, i);
      ASSERT_TRUE(is_same || (i >= 256 && i < 512)) << i;
      num_changed += !is_same;
      if (i < 256 || i >= 512) {
        ASSERT_EQ(data.param(i), before.param(i)) << i;
      }
    }
    ASSERT_EQ(num_changed, 256);
    for (size_t b : {0, 2, 3}) ASSERT_EQ(data.m_scales[b], 0);
  });
}

TEST_F(CompactAdam, ShowsNaN) {
  for_all([&](const cpu::FusedTable& table, const Format& format,
              bool is_stochastic) {
    CompactData data(format, 0, kSize);
    data.set_gradient(300, std::numeric_limits<float>::quiet_NaN());
    step(table, data, is_stochastic, 0, kSize);
    ASSERT_TRUE(std::isnan(data.param(300)));
    ASSERT_TRUE(std::isnan(std::get<0>(data.moment(false, 300))));
    ASSERT_FALSE(std::isnan(data.param(0)));
    ASSERT_FALSE(std::isnan(std::get<0>(data.moment(false, 0))));
  });
}

}  // namespace
}  // namespace smp::kernels
