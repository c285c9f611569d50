#include "csrc/kernels/multi_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/cpp/kernels/elements.h"
#include "tests/cpp/kernels/implementations.h"

namespace smp::kernels {
namespace {

// Odd sizes: empty, one, around the number of lanes, and a long one.
const std::vector<int64_t> kSizes = {0, 1, 7, 8, 9, 15, 16, 17, 1023, 100003};

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
  double epsilon() { return DtypeOf<T>::epsilon; }
};

using ElementTypes = ::testing::Types<float, double, cpu::Half, cpu::BFloat16>;
TYPED_TEST_SUITE(MultiArray, ElementTypes);

TYPED_TEST(MultiArray, SumOfSquaresMatchesNaiveSumWithEveryTable) {
  using Element = cpu::Element<TypeParam>;
  auto arrays = this->random_arrays(1);
  for (auto* table = implementations(); *table != nullptr; ++table) {
    for (const Array& array : this->views(arrays)) {
      const auto* elements = static_cast<const TypeParam*>(array.data);
      for (int64_t begin : {int64_t{0}, array.num_elements / 3}) {
        long double expected = 0;
        for (int64_t i = begin; i < array.num_elements; ++i) {
          const long double value = Element::load(elements[i]);
          expected += value * value;
        }
        const double sum =
            (*table)->sum_of_squares(array, begin, array.num_elements);
        EXPECT_NEAR(sum, static_cast<double>(expected), 1e-12 * sum);
        EXPECT_EQ(sum > 0, begin < array.num_elements);
      }
    }
  }
}

TYPED_TEST(MultiArray, MaxAbsIsExactAndKeepsNan) {
  using Element = cpu::Element<TypeParam>;
  using Compute = typename Element::Compute;
  const double infinity = std::numeric_limits<double>::infinity();
  auto arrays = this->random_arrays(5);
  for (auto* table = implementations(); *table != nullptr; ++table) {
    for (std::vector<TypeParam>& elements : arrays) {
      const auto size = static_cast<int64_t>(elements.size());
      const Array array{elements.data(), size, DtypeOf<TypeParam>::value};
      double expected = 0;
      for (TypeParam e : elements) {
        expected = std::max<double>(expected, std::abs(Element::load(e)));
      }
      EXPECT_EQ((*table)->max_abs(array, 0, size), expected);
      for (int64_t i : {int64_t{0}, size / 2, size - 1}) {
        if (size == 0) continue;
        const TypeParam before = elements[i];
        elements[i] = Element::store(static_cast<Compute>(-infinity));
        EXPECT_EQ((*table)->max_abs(array, 0, size), infinity);
        elements[i] = Element::store(static_cast<Compute>(std::nan("")));
        EXPECT_TRUE(std::isnan((*table)->max_abs(array, 0, size))) << i;
        elements[i] = before;
      }
    }
  }
}

TYPED_TEST(MultiArray, ScaleMatchesNaiveProduct) {
  using Element = cpu::Element<TypeParam>;
  for (auto* table = implementations(); *table != nullptr; ++table) {
    auto arrays = this->random_arrays(2);
    const auto before = arrays;
    for (const Array& array : this->views(arrays)) {
      (*table)->scale(array, 0.37, array.num_elements / 5, array.num_elements);
    }
    for (size_t k = 0; k < arrays.size(); ++k) {
      for (size_t i = 0; i < arrays[k].size(); ++i) {
        const double factor = i < arrays[k].size() / 5 ? 1 : 0.37;
        const double expected = factor * Element::load(before[k][i]);
        ASSERT_NEAR(Element::load(arrays[k][i]), expected,
                    std::abs(expected) * this->epsilon() + 1e-7);
      }
    }
  }
}

TEST(SumOfSquares, FloatsDoNotOverflow) {
  float f[2] = {3e30f, 4e30f};
  const Array array{f, 2, Dtype::kFloat};
  for (auto* table = implementations(); *table != nullptr; ++table) {
    EXPECT_NEAR((*table)->sum_of_squares(array, 0, 2), 25e60, 1e55);
  }
}

}  // namespace
}  // namespace smp::kernels
