#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "tests/cpp/kernels/elements.h"
#include "tests/cpp/kernels/emulated/emulated.h"

// Code that the tests of operators share: sizes, orders of threads, and
// the comparison with the kernels of the CPU.

namespace smp::kernels::emulated {

// Columns for a warp, for blocks of both sizes, and past what these take at
// once.
constexpr int64_t kColumns[] = {1, 31, 33, 127, 1000, 1024, 4096, 8200, 16384};

template <typename T>
class Operators : public ::testing::Test {
 public:
  using C = typename cpu::Element<T>::Compute;
  static constexpr Dtype kDtype = DtypeOf<T>::value;

  /// test(form, rows, columns, offset): arrays are to begin `offset` elements
  /// past an aligned address. Small sizes come in all forms of the operator;
  /// large ones, which take other paths for their size, in the first.
  template <typename Test>
  static void for_sizes(int num_forms, Test&& test) {
    for (int64_t columns : kColumns) {
      const bool is_large = columns > 1024;
      for (int64_t offset : {0, 1}) {
        for (int form = 0; form < (is_large ? 1 : num_forms); ++form) {
          SCOPED_TRACE("columns " + std::to_string(columns) + ", offset " +
                       std::to_string(offset) + ", form " +
                       std::to_string(form));
          test(form, is_large ? int64_t{3} : int64_t{11}, columns, offset);
        }
      }
    }
  }

  /// Launches in all orders, which give the same bits and keep the guards.
  template <typename Launch, typename... Results>
  static void in_all_orders(Launch&& launch, Results&... results) {
    const auto run = [&](Order order) {
      (results.clear(), ...);
      const InOrder in_order(order);
      launch();
      (results.expect_guards(), ...);
    };
    run(Order::kForward);
    const auto first = std::make_tuple(results...);
    for (Order order : {Order::kBackward, Order::kRandom}) {
      run(order);
      std::apply(
          [&](const auto&... want) { (expect_bits(results, want), ...); },
          first);
    }
  }

  template <typename E>
  static void expect_bits(const E& got, const E& want) {
    EXPECT_TRUE(got.has_bits_of(want)) << "differs with the order of threads";
  }

  /// @param scale  size of the terms of a result
  template <typename E>
  static void expect_near(const Elements<E>& got, const Elements<E>& want,
                          double scale) {
    constexpr double kTolerance = DtypeOf<E>::epsilon + 64 * kEpsilon;
    ASSERT_EQ(got.size(), want.size());
    for (int64_t i = 0; i < got.size(); ++i) {
      const auto expected = static_cast<double>(want[i]);
      ASSERT_NEAR(static_cast<double>(got[i]), expected,
                  kTolerance * (std::abs(expected) + scale))
          << "element " << i;
    }
  }

 private:
  static constexpr double kEpsilon = DtypeOf<C>::epsilon;
};

using AllTypes = ::testing::Types<float, double, cpu::Half, cpu::BFloat16>;

}  // namespace smp::kernels::emulated
