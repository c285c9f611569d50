#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/cpu/fused_table.h"
#include "tests/cpp/kernels/compact_data.h"
#include "tests/cpp/kernels/emulated/emulated.h"

// The updates of parameters in all formats at once against those of the CPU,
// one parameter at a time.

namespace smp::kernels::emulated {
namespace {

constexpr int64_t kSizes[] = {1, 31, 256, 1000, 65536 + 77};
constexpr double kRate = 0.02, kDivisor = 2.5;
const AdamOptions kOptions{0.9, 0.99, 1e-3, 0.1, true, true, true};
const UpdateScalars kScalars = {&kRate, &kDivisor, nullptr};

std::vector<CompactData> make_data() {
  std::vector<CompactData> all;
  for (const Format& format : kFormats) {
    for (int64_t size : kSizes) {
      if (size > 65536 && format.grad != Dtype::kFloat) continue;
      all.emplace_back(format, 0, size);
      if (size > 1000) continue;
      all.emplace_back(format, 520, size);      // packs, in another place
      all.emplace_back(format, 301, size);      // no packs
      all.emplace_back(format, 0, size, 0, 1);  // no aligned addresses
    }
  }
  return all;
}

std::vector<CompactArrays> arrays_of(std::vector<CompactData>& all,
                                     bool is_stochastic) {
  std::vector<CompactArrays> arrays;
  for (CompactData& data : all) arrays.push_back(data.arrays(is_stochastic));
  return arrays;
}

void expect_near(const CompactData& got, const CompactData& want, int64_t size,
                 double units) {
  EXPECT_EQ(got.step, want.step);
  for (int64_t i = 0; i < size; ++i) {
    for (bool is_second : {false, true}) {
      const auto [value, unit] = want.moment(is_second, i);
      ASSERT_NEAR(std::get<0>(got.moment(is_second, i)), value,
                  2 * units * unit + 1e-5 * std::abs(value))
          << is_second << " " << i;
    }
    const double p = want.param(i);
    ASSERT_NEAR(got.param(i), p, units * want.param_unit(p) + 1e-5) << i;
  }
}

// Nearly all values have the bits of the CPU; some are rounded the other way.
TEST(EmulatedCompactAdam, MatchesTheCpuInAllOrders) {
  for (bool is_stochastic : {false, true}) {
    auto want = make_data();
    for (const CompactArrays& own : arrays_of(want, is_stochastic)) {
      *own.arrays.step += 1;
      fused().adam_compact(own,
                           adam_factors(kOptions, *own.arrays.step, kDivisor),
                           kRate, 0, own.arrays.num_elements);
    }
    std::vector<CompactData> first;
    for (Order order : {Order::kForward, Order::kBackward, Order::kRandom}) {
      auto got = make_data();
      const auto arrays = arrays_of(got, is_stochastic);
      const InOrder in_order(order);
      expect_launched(cuda::adam_compact(arrays.data(),
                                         static_cast<int64_t>(arrays.size()),
                                         kOptions, kScalars, nullptr));
      if (first.empty()) first = got;
      int64_t num_values = 0, num_other = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE("parameter " + std::to_string(i));
        const int64_t size = arrays[i].arrays.num_elements;
        expect_near(got[i], want[i], size, 1.01);
        for (int64_t j = 0; j < size; ++j) {
          ASSERT_EQ(got[i].param(j), first[i].param(j));
          ASSERT_EQ(got[i].moment(true, j), first[i].moment(true, j));
          const auto [value, unit] = want[i].moment(false, j);
          if (unit == 0) continue;
          const double other = std::get<0>(got[i].moment(false, j));
          num_other += std::abs(other - value) > 0.1 * unit;
          ++num_values;
        }
      }
      EXPECT_GT(num_values, 10000);
      EXPECT_LT(num_other, num_values / 1000);
    }
  }
}

TEST(EmulatedCompactAdam, ChangesNothingAfterAnOverflow) {
  const double found_inf = 1;
  auto data = make_data();
  const auto before = make_data();
  const auto arrays = arrays_of(data, true);
  expect_launched(
      cuda::adam_compact(arrays.data(), static_cast<int64_t>(arrays.size()),
                         kOptions, {&kRate, nullptr, &found_inf}, nullptr));
  for (size_t i = 0; i < data.size(); ++i) {
    expect_near(data[i], before[i], arrays[i].arrays.num_elements, 0);
  }
}

}  // namespace
}  // namespace smp::kernels::emulated
