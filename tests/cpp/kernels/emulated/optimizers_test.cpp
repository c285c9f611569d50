#include "csrc/kernels/optimizers.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "csrc/kernels/cpu/fused_table.h"
#include "tests/cpp/kernels/elements.h"
#include "tests/cpp/kernels/emulated/emulated.h"

// The updates on a list of parameters of all types at once against those of the
// CPU, one parameter at a time.

namespace smp::kernels::emulated {
namespace {

constexpr int64_t kSizes[] = {1, 31, 33, 127, 1000, 16384, 65536 + 77};
constexpr double kRate = 0.02, kDivisor = 2.5;
constexpr float kStepsBefore = 2;

class Parameter {
 public:
  virtual ~Parameter() = default;
  virtual UpdateArrays arrays() = 0;
  /// Both have had the same update.
  virtual void expect_near(Parameter& other) = 0;
  virtual void expect_bits(Parameter& other) = 0;

  float step = kStepsBefore;
};

// Copy: of 16 bits; double for none.
template <typename C, typename G, typename Copy>
class ParameterOf : public Parameter {
 public:
  ParameterOf(int64_t size, int64_t offset, int64_t num_norms)
      : param_(size, 1, 1, offset),
        grad_(size, 2, 1, offset),
        exp_avg_(size, 3, 0.1, offset),
        exp_avg_sq_(num_norms > 0 ? num_norms : size, 4, 0.1, offset),
        copy_(size, 0, 0, offset) {
    for (int64_t i = 0; i < exp_avg_sq_.size(); ++i) {
      exp_avg_sq_.set(i, 1 + static_cast<double>(exp_avg_sq_[i]));
    }
  }

  UpdateArrays arrays() override {
    UpdateArrays a;
    a.param = param_.data();
    a.grad = grad_.data();
    a.exp_avg = exp_avg_.data();
    a.exp_avg_sq = exp_avg_sq_.data();
    a.copy = sizeof(Copy) == 2 ? copy_.data() : nullptr;
    a.step = &step;
    a.num_elements = param_.size();
    a.dtype = DtypeOf<C>::value;
    a.grad_dtype = DtypeOf<G>::value;
    a.copy_dtype = DtypeOf<Copy>::value;
    return a;
  }

  void expect_near(Parameter& other) override {
    auto& want = dynamic_cast<ParameterOf&>(other);
    EXPECT_EQ(step, want.step);
    near(param_, want.param_);
    near(exp_avg_, want.exp_avg_);
    near(exp_avg_sq_, want.exp_avg_sq_);
    near(copy_, want.copy_);
    param_.expect_guards();
    exp_avg_.expect_guards();
    exp_avg_sq_.expect_guards();
    copy_.expect_guards();
  }

  void expect_bits(Parameter& other) override {
    auto& want = dynamic_cast<ParameterOf&>(other);
    EXPECT_EQ(step, want.step);
    EXPECT_TRUE(param_.has_bits_of(want.param_));
    EXPECT_TRUE(exp_avg_.has_bits_of(want.exp_avg_));
    EXPECT_TRUE(exp_avg_sq_.has_bits_of(want.exp_avg_sq_));
    EXPECT_TRUE(copy_.has_bits_of(want.copy_));
  }

 private:
  template <typename T>
  static void near(const Elements<T>& got, const Elements<T>& want) {
    constexpr double kTolerance =
        DtypeOf<T>::epsilon + (sizeof(C) == 8 ? 1e-14 : 2e-6);
    for (int64_t i = 0; i < got.size(); ++i) {
      const auto expected = static_cast<double>(want[i]);
      ASSERT_NEAR(static_cast<double>(got[i]), expected,
                  kTolerance * (1 + std::abs(expected)))
          << "element " << i << " of " << got.size();
    }
  }

  Elements<C> param_;
  Elements<G> grad_;
  Elements<C> exp_avg_, exp_avg_sq_;
  Elements<Copy> copy_;
};

using Parameters = std::vector<std::unique_ptr<Parameter>>;

/// @param num_norms  numbers of `exp_avg_sq`; 0: as many as elements
Parameters make_parameters(int64_t num_norms = 0) {
  Parameters all;
  const auto add = [&](auto* kind, int64_t size, int64_t offset) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    all.push_back(std::make_unique<Kind>(size, offset, num_norms));
  };
  using cpu::BFloat16;
  using cpu::Half;
  for (int64_t size : kSizes) {
    for (int64_t offset : {0, 1}) {
      if (offset == 1 && size > 16384) continue;
      add((ParameterOf<float, float, double>*)nullptr, size, offset);
      add((ParameterOf<float, float, BFloat16>*)nullptr, size, offset);
      add((ParameterOf<float, Half, Half>*)nullptr, size, offset);
      add((ParameterOf<float, BFloat16, BFloat16>*)nullptr, size, offset);
      add((ParameterOf<double, double, double>*)nullptr, size, offset);
    }
  }
  return all;
}

std::vector<UpdateArrays> arrays_of(const Parameters& parameters) {
  std::vector<UpdateArrays> arrays;
  for (const auto& parameter : parameters) {
    arrays.push_back(parameter->arrays());
  }
  return arrays;
}

const AdamOptions kAdamOptions[] = {
    {0.9, 0.99, 1e-3, 0.1, true, true, true},
    {0.8, 0.999, 1e-8, 0.3, false, true, true},
    {0.9, 0.99, 1e-3, 0, true, false, false},
};

const UpdateScalars kScalars = {&kRate, &kDivisor, nullptr};

// update(arrays, scalars) in both orders, then want(arrays, the parameter's
// number) for each parameter.
template <typename Update, typename Want>
void expect_update(int64_t num_norms, Update&& update, Want&& want) {
  Parameters first = make_parameters(num_norms);
  Parameters expected = make_parameters(num_norms);
  {
    const InOrder in_order(Order::kForward);
    update(arrays_of(first));
  }
  for (Order order : {Order::kBackward, Order::kRandom}) {
    Parameters other = make_parameters(num_norms);
    const InOrder in_order(order);
    update(arrays_of(other));
    for (size_t i = 0; i < other.size(); ++i) other[i]->expect_bits(*first[i]);
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const UpdateArrays arrays = expected[i]->arrays();
    *arrays.step += 1;
    want(arrays, i);
    SCOPED_TRACE("parameter " + std::to_string(i));
    first[i]->expect_near(*expected[i]);
  }
}

TEST(EmulatedOptimizers, AdamMatchesTheCpu) {
  for (const AdamOptions& options : kAdamOptions) {
    const AdamFactors factors =
        adam_factors(options, kStepsBefore + 1, kDivisor);
    expect_update(
        0,
        [&](const std::vector<UpdateArrays>& arrays) {
          expect_launched(cuda::adam(arrays.data(),
                                     static_cast<int64_t>(arrays.size()),
                                     options, kScalars, nullptr));
        },
        [&](const UpdateArrays& arrays, size_t) {
          fused().adam(arrays, factors, kRate, 0, arrays.num_elements);
        });
  }
}

TEST(EmulatedOptimizers, LambMatchesTheCpu) {
  for (const AdamOptions& adam : kAdamOptions) {
    const LambOptions options = {adam, true};
    const AdamFactors factors = adam_factors(adam, kStepsBefore + 1, kDivisor);
    std::vector<double> sums;
    expect_update(
        0,
        [&](const std::vector<UpdateArrays>& arrays) {
          const auto num = static_cast<int64_t>(arrays.size());
          std::vector<double> partial(
              cuda::num_lamb_partial_sums(arrays.data(), num), NAN);
          sums.assign(2 * num, NAN);
          expect_launched(cuda::lamb_moments(arrays.data(), num, adam, kScalars,
                                             partial.data(), sums.data(),
                                             nullptr));
          expect_launched(cuda::lamb_apply(arrays.data(), num, options,
                                           kScalars, sums.data(), nullptr));
        },
        [&](const UpdateArrays& arrays, size_t i) {
          double want[2];
          fused().lamb_moments(arrays, factors, 0, arrays.num_elements, want);
          const size_t num = sums.size() / 2;
          EXPECT_NEAR(sums[i], want[0], 1e-6 * want[0]);
          EXPECT_NEAR(sums[num + i], want[1], 1e-5 * want[1]);
          fused().lamb_apply(arrays, factors,
                             kRate * trust_ratio(options, want[0], want[1]), 0,
                             arrays.num_elements);
        });
  }
}

TEST(EmulatedOptimizers, NovoGradMatchesTheCpu) {
  for (const AdamOptions& adam : kAdamOptions) {
    const NovoGradOptions options = {adam, adam.beta1 == 0.8, false};
    constexpr double kNorm = 3;
    expect_update(
        1,
        [&](const std::vector<UpdateArrays>& arrays) {
          const std::vector<double> norms(arrays.size(), kNorm);
          expect_launched(
              cuda::novograd(arrays.data(), static_cast<int64_t>(arrays.size()),
                             options, kScalars, norms.data(), nullptr));
        },
        [&](const UpdateArrays& arrays, size_t) {
          const auto move = [&](auto* running) {
            *running = static_cast<std::remove_pointer_t<decltype(running)>>(
                running_norm(options, kStepsBefore + 1, *running, kNorm,
                             kDivisor));
            fused().momentum(arrays,
                             novograd_factors(options, kStepsBefore + 1,
                                              *running, kRate, kDivisor),
                             0, arrays.num_elements);
          };
          arrays.dtype == Dtype::kDouble
              ? move(static_cast<double*>(arrays.exp_avg_sq))
              : move(static_cast<float*>(arrays.exp_avg_sq));
        });
  }
}

TEST(EmulatedOptimizers, NothingChangesAfterAnOverflow) {
  const double found_inf = 1;
  const UpdateScalars scalars = {&kRate, nullptr, &found_inf};
  Parameters changed = make_parameters();
  Parameters before = make_parameters();
  const std::vector<UpdateArrays> arrays = arrays_of(changed);
  const auto num = static_cast<int64_t>(arrays.size());
  std::vector<double> partial(cuda::num_lamb_partial_sums(arrays.data(), num)),
      sums(2 * num, NAN);
  expect_launched(
      cuda::adam(arrays.data(), num, kAdamOptions[0], scalars, nullptr));
  expect_launched(cuda::lamb_moments(arrays.data(), num, kAdamOptions[0],
                                     scalars, partial.data(), sums.data(),
                                     nullptr));
  expect_launched(cuda::lamb_apply(arrays.data(), num, {kAdamOptions[0], true},
                                   scalars, sums.data(), nullptr));
  const std::vector<double> norms(num, 1);
  expect_launched(
      cuda::novograd(arrays.data(), num, {}, scalars, norms.data(), nullptr));
  EXPECT_EQ(sums, std::vector<double>(2 * num, 0));
  for (size_t i = 0; i < changed.size(); ++i) {
    changed[i]->expect_bits(*before[i]);
  }
}

}  // namespace
}  // namespace smp::kernels::emulated
