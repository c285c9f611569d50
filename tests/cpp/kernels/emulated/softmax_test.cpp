#include "csrc/kernels/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "csrc/kernels/cpu/fused_table.h"
#include "tests/cpp/kernels/emulated/operators.h"

namespace smp::kernels::emulated {
namespace {

template <typename T>
class EmulatedSoftmax : public Operators<T> {};
TYPED_TEST_SUITE(EmulatedSoftmax, AllTypes);

struct Form {
  bool has_mask, has_slopes, is_causal, has_dropout;
  int64_t window;
};
constexpr Form kForms[] = {{true, false, true, true, 0},
                           {false, false, false, false, 0},
                           {true, true, true, false, 40},
                           {false, true, false, true, 0}};

TYPED_TEST(EmulatedSoftmax, ProbabilitiesMatchTheCpu) {
  using C = typename TestFixture::C;
  this->for_sizes(4, [&](int number, int64_t num_rows, int64_t n,
                         int64_t offset) {
    // Two heads; more queries than keys leave some without any.
    const int64_t queries = num_rows / 2 + 1, rows = 2 * queries;
    const Form& form = kForms[number];
    Elements<TypeParam> scores(rows * n, 1, 3, offset),
        dy(rows * n, 2, 1, offset), probs(rows * n, 0, 0, offset),
        y(rows * n, 0, 0, offset), dscores(rows * n, 0, 0, offset),
        want_probs(rows * n), want_y(rows * n), want_dscores(rows * n);
    Elements<C> mask(queries * n, 3, 1), slopes(2, 4, 0.01);
    ScaledMaskedSoftmax op;
    op.scores = scores.data();
    op.mask = form.has_mask ? mask.data() : nullptr;
    op.slopes = form.has_slopes ? slopes.data() : nullptr;
    op.probs = probs.data();
    op.y = form.has_dropout ? y.data() : nullptr;
    op.batch_size = 1;
    op.num_heads = 2;
    op.num_queries = queries;
    op.num_keys = n;
    op.mask_query_stride = n;
    op.scale = 0.5;
    op.is_causal = form.is_causal;
    op.window = form.window;
    op.dropout = make_dropout(form.has_dropout ? 0.25 : 0, 9);
    op.dtype = this->kDtype;
    ScaledMaskedSoftmaxBackward back = {
        dy.data(), probs.data(),   dscores.data(), rows,       queries,     n,
        0.5,       form.is_causal, form.window,    op.dropout, this->kDtype};
    this->in_all_orders(
        [&] {
          expect_launched(cuda::softmax_forward(op, nullptr));
          expect_launched(cuda::softmax_backward(back, nullptr));
        },
        probs, y, dscores);
    op.probs = want_probs.data();
    op.y = form.has_dropout ? want_y.data() : nullptr;
    fused().softmax_forward(op, 0, rows);
    back.dscores = want_dscores.data();  // of the probabilities of above
    fused().softmax_backward(back, 0, rows);
    this->expect_near(probs, want_probs, 1e-3);
    this->expect_near(y, want_y, 1e-3);
    this->expect_near(dscores, want_dscores, 0.1);
  });
}

TYPED_TEST(EmulatedSoftmax, CrossEntropyMatchesTheCpu) {
  using C = typename TestFixture::C;
  this->for_sizes(2, [&](int form, int64_t rows, int64_t n, int64_t offset) {
    const int64_t gap = form * 8;  // between rows of a view
    Elements<TypeParam> logits(rows * (n + gap), 1, 4, offset),
        dlogits(rows * n, 0, 0, offset), want_dlogits(rows * n);
    Elements<C> dloss(rows, 2, 1), max(rows), exp_sum(rows), target(rows),
        sum(rows), want_max(rows), want_exp_sum(rows), want_target(rows),
        want_sum(rows);
    std::vector<int64_t> targets(rows);
    // Here, before, to be ignored, after.
    for (int64_t i = 0; i < rows; ++i) {
      targets[i] = (const int64_t[]){10 + n - 1, 3, -100, 10 + n + 5}[i % 4];
    }
    CrossEntropy op = {logits.data(), targets.data(),
                       max.data(),    exp_sum.data(),
                       target.data(), gap == 0 ? sum.data() : nullptr,
                       rows,          n,
                       n + gap,       10,
                       n + 20,        -100,
                       this->kDtype};
    CrossEntropyBackward back = {dloss.data(),
                                 logits.data(),
                                 targets.data(),
                                 max.data(),
                                 exp_sum.data(),
                                 dlogits.data(),
                                 rows,
                                 n,
                                 n + gap,
                                 10,
                                 -100,
                                 n + 20,
                                 0.1,
                                 this->kDtype};
    this->in_all_orders(
        [&] {
          expect_launched(cuda::cross_entropy_forward(op, nullptr));
          expect_launched(cuda::cross_entropy_backward(back, nullptr));
        },
        max, exp_sum, target, sum, dlogits);
    op.max = want_max.data();
    op.exp_sum = want_exp_sum.data();
    op.target_logit = want_target.data();
    op.sum = gap == 0 ? want_sum.data() : nullptr;
    fused().cross_entropy_forward(op, 0, rows);
    back.max = want_max.data();
    back.exp_sum = want_exp_sum.data();
    back.dlogits = want_dlogits.data();
    fused().cross_entropy_backward(back, 0, rows);
    this->expect_near(max, want_max, 0);
    this->expect_near(exp_sum, want_exp_sum, 1);
    this->expect_near(target, want_target, 0);
    this->expect_near(sum, want_sum, 16);
    this->expect_near(dlogits, want_dlogits, 1e-3);
  });
}

// ---- Cross entropy against its formula in long double

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rows of logits that are hard to sum up.
enum Row {
  kNormal,
  kRising,       // each pack has a new maximum
  kFarFromZero,  // differences are much smaller than the logits
  kLargest,      // of both signs
  kOneFinite,    // the last one, among -inf
  kMasked,       // all are -inf
  kHasNan,
  kNumRows,
};

template <typename T>
constexpr double kLargestOf = 3e38;
template <>
constexpr double kLargestOf<double> = 1e308;
template <>
constexpr double kLargestOf<cpu::Half> = 65504;

template <typename T>
void set_rows(Elements<T>& logits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto set = [&](Row row, double v) { logits.set(row * n + i, v); };
    const auto normal = static_cast<double>(logits[i]);
    const bool is_last = i == n - 1;
    set(kRising, -60 + 80.0 * static_cast<double>(i) / static_cast<double>(n));
    set(kFarFromZero, 10000 + normal);
    set(kLargest, i % 3 == 0 ? kLargestOf<T> : -kLargestOf<T>);
    set(kOneFinite, is_last ? -3 : -kInfinity);
    set(kMasked, -kInfinity);
    set(kHasNan, is_last ? std::nan("") : normal);
  }
}

TYPED_TEST(EmulatedSoftmax, CrossEntropyIsExactInHardRows) {
  using C = typename TestFixture::C;
  for (int64_t n : {1, 5, 33, 1024, 8200, 50257, 50400}) {
    SCOPED_TRACE("columns " + std::to_string(n));
    Elements<TypeParam> logits(kNumRows * n, 1, 4);
    set_rows(logits, n);
    Elements<C> max(kNumRows), exp_sum(kNumRows), target(kNumRows);
    const std::vector<int64_t> targets(kNumRows, n - 1);
    CrossEntropy op;
    op.logits = logits.data();
    op.targets = targets.data();
    op.max = max.data();
    op.exp_sum = exp_sum.data();
    op.target_logit = target.data();
    op.num_rows = kNumRows;
    op.num_columns = op.row_stride = op.vocab_size = n;
    op.dtype = this->kDtype;
    this->in_all_orders(
        [&] { expect_launched(cuda::cross_entropy_forward(op, nullptr)); }, max,
        exp_sum, target);
    EXPECT_EQ(max[kMasked], -kInfinity);
    EXPECT_EQ(exp_sum[kMasked], 0);
    EXPECT_TRUE(std::isnan(exp_sum[kHasNan]));
    for (int row : {kNormal, kRising, kFarFromZero, kLargest, kOneFinite}) {
      SCOPED_TRACE("row " + std::to_string(row));
      long double want_max = -kInfinity, want = 0;
      for (int64_t i = 0; i < n; ++i) {
        want_max = std::max(want_max, logits[row * n + i]);
      }
      for (int64_t i = 0; i < n; ++i) {
        want += std::exp(logits[row * n + i] - want_max);
      }
      EXPECT_EQ(max[row], want_max);
      EXPECT_NEAR(exp_sum[row] / want, 1, 4 * DtypeOf<C>::epsilon);
      const auto last = static_cast<C>(logits[row * n + n - 1]);
      EXPECT_EQ(target[row], last - static_cast<C>(want_max));
    }
  }
}

}  // namespace
}  // namespace smp::kernels::emulated
