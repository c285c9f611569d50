#include "csrc/kernels/optimizers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/cpp/kernels/element.h"
#include "tests/cpp/kernels/implementations.h"

// Every table that this processor can run against loops in long double, for all
// types of gradients and copies. What is outside of the range must stay.

namespace smp::kernels {
namespace {

template <typename T>
constexpr Dtype kDtypeOf = std::is_same_v<T, double>      ? Dtype::kDouble
                           : std::is_same_v<T, float>     ? Dtype::kFloat
                           : std::is_same_v<T, cpu::Half> ? Dtype::kHalf
                                                          : Dtype::kBFloat16;

// Parameter, gradient, copy.
template <typename C, typename G, typename W>
struct Types {
  using Param = C;
  using Grad = G;
  using Copy = W;
};

constexpr int64_t kSize = 300;
constexpr std::tuple<int64_t, int64_t> kRanges[] = {
    {0, 0}, {0, 1}, {0, 7}, {0, 16}, {0, 300}, {16, 49}, {3, 290}, {299, 300}};

template <typename T>
std::vector<T> random_vector(int seed, double mean, double spread) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(mean, spread);
  std::vector<T> result;
  using Element = cpu::Element<T>;
  for (int64_t i = 0; i < kSize; ++i) {
    result.push_back(
        Element::store(static_cast<typename Element::Compute>(normal(random))));
  }
  return result;
}

template <typename T>
class Update : public ::testing::Test {
 protected:
  using C = typename T::Param;
  using G = typename T::Grad;
  using W = typename T::Copy;
  static constexpr double kTolerance = sizeof(C) == 8 ? 1e-14 : 2e-6;

  struct Data {
    std::vector<C> param = random_vector<C>(1, 0, 1);
    std::vector<G> grad = random_vector<G>(2, 0, 1);
    std::vector<C> exp_avg = random_vector<C>(3, 0, 0.1);
    std::vector<C> exp_avg_sq = random_vector<C>(4, 1, 0.1);
    // The copy of element 1 lies on a cache line, that of element 0 does not.
    std::vector<W> memory = std::vector<W>(kSize + 128);
    W* copy = nullptr;

    UpdateArrays arrays(bool has_copy, bool bypasses) {
      UpdateArrays a;
      a.param = param.data();
      a.grad = grad.data();
      a.exp_avg = exp_avg.data();
      a.exp_avg_sq = exp_avg_sq.data();
      a.num_elements = kSize;
      a.dtype = kDtypeOf<C>;
      a.grad_dtype = kDtypeOf<G>;
      a.bypasses_cache = bypasses;
      if (has_copy) {
        const auto address = reinterpret_cast<uintptr_t>(memory.data());
        copy = memory.data() + (64 - address % 64) / sizeof(W);
        a.copy = copy;
        a.copy_dtype = kDtypeOf<W>;
      }
      return a;
    }
  };

  // test(table, begin, end, has_copy, bypasses)
  template <typename Test>
  void for_all(Test&& test) {
    for (auto* table = implementations(); *table != nullptr; ++table) {
      for (auto [begin, end] : kRanges) {
        for (int copy = 0; copy < (sizeof(C) == 4 ? 3 : 1); ++copy) {
          SCOPED_TRACE(::testing::Message()
                       << begin << " to " << end << ", copy " << copy);
          test(**table, begin, end, copy > 0, copy > 1);
        }
      }
    }
  }

  static void expect_near(C got, long double want) {
    ASSERT_NEAR(static_cast<double>(got), static_cast<double>(want),
                kTolerance * (1 + std::abs(static_cast<double>(want))));
  }

  // The copy is the rounded parameter inside of the range, untouched outside.
  static void expect_copy(const Data& data, int64_t begin, int64_t end) {
    if (data.copy == nullptr) return;
    if constexpr (sizeof(C) == 4) {
      for (int64_t i = 0; i < kSize; ++i) {
        const uint16_t want = i >= begin && i < end
                                  ? cpu::Element<W>::store(data.param[i]).bits
                                  : uint16_t{0};
        ASSERT_EQ(data.copy[i].bits, want) << i;
      }
    }
  }
};

using AllTypes = ::testing::Types<Types<float, float, cpu::BFloat16>,
                                  Types<float, cpu::Half, cpu::Half>,
                                  Types<float, cpu::BFloat16, cpu::BFloat16>,
                                  Types<double, double, cpu::Half>>;
TYPED_TEST_SUITE(Update, AllTypes);

struct Moments {
  long double m, v, u;
};

// One element of Adam, written from the formulas of the paper.
Moments adam_element(const AdamOptions& o, int step, double divisor,
                     long double p, long double g, long double m,
                     long double v) {
  g /= divisor;
  if (!o.is_decoupled) g += o.weight_decay * p;
  m = o.beta1 * m + (o.has_grad_averaging ? 1 - o.beta1 : 1) * g;
  v = o.beta2 * v + (1 - o.beta2) * g * g;
  long double m_hat = m, v_hat = v;
  if (o.has_bias_correction) {
    m_hat /= 1 - std::pow(static_cast<long double>(o.beta1), step);
    v_hat /= 1 - std::pow(static_cast<long double>(o.beta2), step);
  }
  long double u = m_hat / (std::sqrt(v_hat) + o.eps);
  if (o.is_decoupled) u += o.weight_decay * p;
  return {m, v, u};
}

const AdamOptions kAdamOptions[] = {
    {0.9, 0.99, 1e-3, 0.1, true, true, true},
    {0.8, 0.999, 1e-8, 0.3, false, true, true},
    {0.9, 0.99, 1e-3, 0, true, false, false},
};

TYPED_TEST(Update, AdamMatchesNaiveLoops) {
  using Data = typename TestFixture::Data;
  for (const AdamOptions& options : kAdamOptions) {
    const AdamFactors factors = adam_factors(options, 3, 2.5);
    this->for_all([&](const cpu::FusedTable& table, int64_t begin, int64_t end,
                      bool has_copy, bool bypasses) {
      Data data;
      const Data before = data;
      table.adam(data.arrays(has_copy, bypasses), factors, 0.02, begin, end);
      for (int64_t i = 0; i < kSize; ++i) {
        if (i < begin || i >= end) {
          ASSERT_EQ(data.param[i], before.param[i]);
          ASSERT_EQ(data.exp_avg[i], before.exp_avg[i]);
          ASSERT_EQ(data.exp_avg_sq[i], before.exp_avg_sq[i]);
          continue;
        }
        const auto want = adam_element(
            options, 3, 2.5, before.param[i],
            cpu::Element<typename TypeParam::Grad>::load(before.grad[i]),
            before.exp_avg[i], before.exp_avg_sq[i]);
        this->expect_near(data.exp_avg[i], want.m);
        this->expect_near(data.exp_avg_sq[i], want.v);
        this->expect_near(data.param[i], before.param[i] - 0.02L * want.u);
      }
      this->expect_copy(data, begin, end);
    });
  }
}

TYPED_TEST(Update, LambMatchesNaiveLoopsInTwoPhases) {
  using Data = typename TestFixture::Data;
  for (const AdamOptions& options : kAdamOptions) {
    const AdamFactors factors = adam_factors(options, 3, 2.5);
    this->for_all([&](const cpu::FusedTable& table, int64_t begin, int64_t end,
                      bool has_copy, bool bypasses) {
      Data data;
      const Data before = data;
      const UpdateArrays arrays = data.arrays(has_copy, bypasses);
      double sums[2];
      table.lamb_moments(arrays, factors, begin, end, sums);
      ASSERT_EQ(data.param, before.param);
      table.lamb_apply(arrays, factors, 0.02, begin, end);
      long double param_squares = 0, update_squares = 0;
      for (int64_t i = 0; i < kSize; ++i) {
        if (i < begin || i >= end) {
          ASSERT_EQ(data.param[i], before.param[i]);
          ASSERT_EQ(data.exp_avg[i], before.exp_avg[i]);
          continue;
        }
        const long double p = before.param[i];
        const auto want = adam_element(
            options, 3, 2.5, p,
            cpu::Element<typename TypeParam::Grad>::load(before.grad[i]),
            before.exp_avg[i], before.exp_avg_sq[i]);
        param_squares += p * p;
        update_squares += want.u * want.u;
        this->expect_near(data.exp_avg[i], want.m);
        this->expect_near(data.exp_avg_sq[i], want.v);
        this->expect_near(data.param[i], p - 0.02L * want.u);
      }
      EXPECT_NEAR(sums[0], static_cast<double>(param_squares),
                  this->kTolerance * sums[0]);
      EXPECT_NEAR(sums[1], static_cast<double>(update_squares),
                  4 * this->kTolerance * sums[1]);
      this->expect_copy(data, begin, end);
    });
  }
}

TYPED_TEST(Update, MomentumMatchesNaiveLoops) {
  using Data = typename TestFixture::Data;
  for (const MomentumFactors& f :
       {MomentumFactors{0.4, 0, 0.9, 0.1, 0.05, 0.01},
        MomentumFactors{0.4, 0.2, 0.9, 1, 0.05, 0}}) {
    this->for_all([&](const cpu::FusedTable& table, int64_t begin, int64_t end,
                      bool has_copy, bool bypasses) {
      Data data;
      const Data before = data;
      table.momentum(data.arrays(has_copy, bypasses), f, begin, end);
      ASSERT_EQ(data.exp_avg_sq, before.exp_avg_sq);
      for (int64_t i = 0; i < kSize; ++i) {
        long double p = before.param[i], m = before.exp_avg[i];
        if (i >= begin && i < end) {
          const long double g =
              f.grad_factor *
                  cpu::Element<typename TypeParam::Grad>::load(before.grad[i]) +
              f.l2 * p;
          m = f.beta1 * m + f.grad_part * g;
          p -= f.rate * m + f.decay * p;
        }
        this->expect_near(data.exp_avg[i], m);
        this->expect_near(data.param[i], p);
      }
      this->expect_copy(data, begin, end);
    });
  }
}

TEST(TrustRatio, IsTheRatioOfLengthsWhereThereIsWeightDecay) {
  LambOptions options;
  EXPECT_EQ(trust_ratio(options, 9, 4), 1);
  options.adam.weight_decay = 0.1;
  EXPECT_EQ(trust_ratio(options, 9, 4), 1.5);
  EXPECT_EQ(trust_ratio(options, 0, 4), 1);
  EXPECT_EQ(trust_ratio(options, 9, 0), 1);
  options.adam.weight_decay = 0;
  options.always_has_ratio = true;
  EXPECT_EQ(trust_ratio(options, 9, 4), 1.5);
}

TEST(RunningNorm, StartsAtTheFirstNormOrAtZero) {
  NovoGradOptions options;
  options.adam.beta2 = 0.75;
  EXPECT_EQ(running_norm(options, 1, 99, 6, 2), 3);
  EXPECT_EQ(running_norm(options, 2, 2, 8, 2), std::sqrt(3 + 0.25 * 16));
  options.starts_at_zero = true;
  EXPECT_EQ(running_norm(options, 1, 99, 8, 2), 2);
  options.is_max_norm = true;
  EXPECT_EQ(running_norm(options, 1, 99, 8, 2), 1);
  EXPECT_EQ(running_norm(options, 2, 2, 8, 2), 2.5);
}

}  // namespace
}  // namespace smp::kernels
