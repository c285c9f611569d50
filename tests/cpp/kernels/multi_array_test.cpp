#include "csrc/kernels/multi_array.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "csrc/kernels/cpu/element.h"

namespace smp::kernels {
namespace {

// Odd sizes: empty, one, around the number of lanes, and a long one.
const std::vector<int64_t> kSizes = {0, 1, 7, 8, 9, 15, 16, 17, 1023, 100003};

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::kFloat;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::kDouble;
};
template <>
struct DtypeOf<cpu::Half> {
  static constexpr Dtype value = Dtype::kHalf;
};
template <>
struct DtypeOf<cpu::BFloat16> {
  static constexpr Dtype value = Dtype::kBFloat16;
};

template <typename T>
class MultiArray : public ::testing::Test {
 protected:
  using Element = cpu::Element<T>;
  using Compute = typename Element::Compute;

  std::vector<std::vector<T>> random_arrays(int seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::vector<T>> arrays;
    for (int64_t size : kSizes) {
      std::vector<T>& array = arrays.emplace_back();
      for (int64_t i = 0; i < size; ++i) {
        array.push_back(Element::store(static_cast<Compute>(normal(random))));
      }
    }
    return arrays;
  }

  std::vector<Array> views(std::vector<std::vector<T>>& arrays) {
    std::vector<Array> result;
    for (std::vector<T>& array : arrays) {
      result.push_back({array.data(), static_cast<int64_t>(array.size()),
                        DtypeOf<T>::value});
    }
    return result;
  }

  // One unit in the last place, relative.
  double epsilon() {
    if (std::is_same_v<T, double>) return 0x1p-52;
    if (std::is_same_v<T, float>) return 0x1p-23;
    return std::is_same_v<T, cpu::Half> ? 0x1p-10 : 0x1p-7;
  }
};

using Elements = ::testing::Types<float, double, cpu::Half, cpu::BFloat16>;
TYPED_TEST_SUITE(MultiArray, Elements);

TYPED_TEST(MultiArray, SumOfSquaresMatchesNaiveSum) {
  using Element = cpu::Element<TypeParam>;
  auto arrays = this->random_arrays(1);
  long double expected = 0;
  for (const auto& array : arrays) {
    for (TypeParam element : array) {
      const long double value = Element::load(element);
      expected += value * value;
    }
  }
  const std::vector<Array> views = this->views(arrays);
  const double sum = cpu::sum_of_squares(views.data(), views.size());
  EXPECT_GT(sum, 90000);
  EXPECT_NEAR(sum, static_cast<double>(expected), 1e-12 * sum);
  EXPECT_EQ(cpu::sum_of_squares(views.data(), views.size()), sum);
}

TYPED_TEST(MultiArray, ScaleMatchesNaiveProduct) {
  using Element = cpu::Element<TypeParam>;
  auto arrays = this->random_arrays(2);
  const auto before = arrays;
  const std::vector<Array> views = this->views(arrays);
  cpu::scale(views.data(), views.size(), 0.37);
  for (size_t k = 0; k < arrays.size(); ++k) {
    for (size_t i = 0; i < arrays[k].size(); ++i) {
      const double expected = 0.37 * Element::load(before[k][i]);
      ASSERT_NEAR(Element::load(arrays[k][i]), expected,
                  std::abs(expected) * this->epsilon() + 1e-7);
    }
  }
}

TYPED_TEST(MultiArray, AddScaledMatchesNaiveSum) {
  using Element = cpu::Element<TypeParam>;
  auto y = this->random_arrays(3);
  const auto x = this->random_arrays(4);
  const auto before = y;
  std::vector<ArrayPair> pairs;
  for (size_t k = 0; k < y.size(); ++k) {
    pairs.push_back({y[k].data(), x[k].data(),
                     static_cast<int64_t>(y[k].size()),
                     DtypeOf<TypeParam>::value});
  }
  cpu::add_scaled(pairs.data(), pairs.size(), -1.7);
  for (size_t k = 0; k < y.size(); ++k) {
    for (size_t i = 0; i < y[k].size(); ++i) {
      const double a = Element::load(before[k][i]);
      const double b = -1.7 * Element::load(x[k][i]);
      ASSERT_NEAR(Element::load(y[k][i]), a + b,
                  (std::abs(a) + std::abs(b)) * this->epsilon() + 1e-7);
    }
  }
}

TEST(SumOfSquares, MixesDtypesAndIsZeroForNothing) {
  EXPECT_EQ(cpu::sum_of_squares(nullptr, 0), 0.0);
  float f[2] = {3, 4};
  double d[1] = {5};
  cpu::BFloat16 b[1] = {cpu::to_bfloat16(2)};
  const Array arrays[] = {
      {f, 2, Dtype::kFloat}, {d, 1, Dtype::kDouble}, {b, 1, Dtype::kBFloat16}};
  EXPECT_EQ(cpu::sum_of_squares(arrays, 3), 54.0);
}

TEST(SumOfSquares, FloatsDoNotOverflow) {
  float f[2] = {3e30f, 4e30f};
  const Array array{f, 2, Dtype::kFloat};
  EXPECT_NEAR(cpu::sum_of_squares(&array, 1), 25e60, 1e55);
}

}  // namespace
}  // namespace smp::kernels
