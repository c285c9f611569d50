#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/cpp/kernels/elements.h"
#include "tests/cpp/kernels/implementations.h"

// Every implementation against loops in long double. Each row ends in a part of
// a vector; guards around the results must stay.

namespace smp::kernels {
namespace {

constexpr int64_t kColumns[] = {1, 3, 7, 8, 15, 16, 17, 31, 64, 67, 130, 259};

template <typename T>
class Fused : public ::testing::Test {
 protected:
  using Compute = typename cpu::Element<T>::Compute;
  static constexpr Dtype kDtype = DtypeOf<T>::value;
  // Tolerance for a result of size 1: its rounding, and some of the
  // computation's.
  static constexpr double kTolerance =
      DtypeOf<T>::epsilon + 16 * DtypeOf<Compute>::epsilon;

  template <typename Test>
  void for_all_tables(Test&& test) {
    int count = 0;
    for (auto* table = implementations(); *table != nullptr; ++table) {
      SCOPED_TRACE("table " + std::to_string(count++));
      for (int64_t columns : kColumns) {
        SCOPED_TRACE("columns " + std::to_string(columns));
        test(**table, columns);
      }
    }
    ASSERT_GE(count, 1);
  }

  static void expect_near(long double got, long double want, double scale = 1) {
    ASSERT_NEAR(static_cast<double>(got), static_cast<double>(want),
                kTolerance * (std::abs(static_cast<double>(want)) + scale));
  }
};

using Types = ::testing::Types<float, double, cpu::Half, cpu::BFloat16>;
TYPED_TEST_SUITE(Fused, Types);

TYPED_TEST(Fused, LayerNormMatchesNaiveLoops) {
  using Compute = typename TestFixture::Compute;
  constexpr int64_t kRows = 3;
  this->for_all_tables([&](const cpu::FusedTable& table, int64_t n) {
    Elements<TypeParam> x(kRows * n, 1, 2), dy(kRows * n, 2, 1), y(kRows * n),
        dx(kRows * n);
    Elements<Compute> weight(n, 3, 1), bias(n, 4, 1), mean(kRows), rstd(kRows),
        dweight(n), dbias(n);
    table.norm_forward(
        {x.data(), weight.data(), bias.data(), y.data(), mean.data(),
         rstd.data(), kRows, n, 0.01, false, this->kDtype},
        0, kRows);
    table.norm_backward(
        {dy.data(), x.data(), mean.data(), rstd.data(), weight.data(),
         dx.data(), kRows, n, false, this->kDtype},
        0, kRows, dweight.data(), dbias.data());
    std::vector<long double> weight_sums(n), bias_sums(n);
    for (int64_t row = 0; row < kRows; ++row) {
      long double m = 0, variance = 0, a = 0, b = 0;
      for (int64_t j = 0; j < n; ++j) m += x[row * n + j] / n;
      for (int64_t j = 0; j < n; ++j) {
        variance += (x[row * n + j] - m) * (x[row * n + j] - m) / n;
      }
      const long double r = 1 / std::sqrt(variance + 0.01L);
      for (int64_t j = 0; j < n; ++j) {
        const long double d = dy[row * n + j];
        const long double normalised = (x[row * n + j] - m) * r;
        this->expect_near(y[row * n + j], normalised * weight[j] + bias[j], 4);
        weight_sums[j] += d * normalised;
        bias_sums[j] += d;
        a += d * weight[j] / n;
        b += d * weight[j] * normalised / n;
      }
      for (int64_t j = 0; j < n; ++j) {
        const long double normalised = (x[row * n + j] - m) * r;
        const long double want =
            r * (dy[row * n + j] * weight[j] - a - b * normalised);
        this->expect_near(dx[row * n + j], want, 16 * static_cast<double>(r));
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      this->expect_near(dweight[j], weight_sums[j], 8);
      this->expect_near(dbias[j], bias_sums[j], 8);
    }
    y.expect_guards();
    dx.expect_guards();
    dweight.expect_guards();
    dbias.expect_guards();
  });
}

TYPED_TEST(Fused, GeluMatchesErfAndTanh) {
  using Compute = typename TestFixture::Compute;
  constexpr int64_t kRows = 2;
  this->for_all_tables([&](const cpu::FusedTable& table, int64_t n) {
    for (bool is_tanh : {false, true}) {
      Elements<TypeParam> x(kRows * n, 1, 3), dy(kRows * n, 2, 1), y(kRows * n),
          dx(kRows * n);
      Elements<Compute> bias(n, 3, 1), dbias(n);
      BiasGelu op = {x.data(), bias.data(), nullptr, y.data(),
                     kRows,    n,           is_tanh, this->kDtype};
      table.bias_gelu_forward(op, 0, kRows);
      op.dy = dy.data();
      op.result = dx.data();
      table.bias_gelu_backward(op, 0, kRows, dbias.data());
      for (int64_t i = 0; i < kRows * n; ++i) {
        const long double v = x[i] + bias[i % n];
        const long double cubic = 0.044715L;
        const long double u =
            std::sqrt(2 / std::acos(-1.0L)) * (v + cubic * v * v * v);
        const long double cdf = is_tanh ? 1 / (1 + std::exp(-2 * u))
                                        : std::erfc(-v / std::sqrt(2.0L)) / 2;
        const long double du =
            std::sqrt(2 / std::acos(-1.0L)) * (1 + 3 * cubic * v * v);
        const long double density =
            is_tanh ? 2 * cdf * (1 - cdf) * du
                    : std::exp(-v * v / 2) / std::sqrt(2 * std::acos(-1.0L));
        this->expect_near(y[i], v * cdf);
        this->expect_near(dx[i], dy[i] * (cdf + v * density), 4);
      }
      y.expect_guards();
      dx.expect_guards();
      dbias.expect_guards();
    }
  });
}

TYPED_TEST(Fused, SoftmaxMatchesNaiveLoopsAndWindows) {
  using Compute = typename TestFixture::Compute;
  constexpr int64_t kHeads = 2, kQueries = 3, kRows = kHeads * kQueries;
  this->for_all_tables([&](const cpu::FusedTable& table, int64_t n) {
    Elements<TypeParam> scores(kRows * n, 1, 3), probs(kRows * n), y(kRows * n);
    Elements<TypeParam> dy(kRows * n, 4, 1), dscores(kRows * n);
    Elements<Compute> mask(kQueries * n, 2, 1), slopes(kHeads, 3, 1);
    ScaledMaskedSoftmax op;
    op.scores = scores.data();
    op.mask = mask.data();
    op.slopes = slopes.data();
    op.probs = probs.data();
    op.y = y.data();
    op.batch_size = 1;
    op.num_heads = kHeads;
    op.num_queries = kQueries;
    op.num_keys = n;
    op.mask_query_stride = n;
    op.scale = 0.5;
    op.is_causal = true;
    op.window = 5;
    op.dropout = make_dropout(0.25, 9);
    op.dtype = this->kDtype;
    table.softmax_forward(op, 0, kRows);
    table.softmax_backward(
        {dy.data(), probs.data(), dscores.data(), kRows, kQueries, n, 0.5, true,
         5, op.dropout, this->kDtype},
        0, kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t query = row % kQueries;
      const KeyRange range = visible_keys(query, kQueries, n, true, 5);
      const RowKey key = row_key(9, row);
      std::vector<long double> e(n), d(n);
      long double sum = 0, dot = 0;
      for (int64_t j = range.begin; j < range.end; ++j) {
        const auto distance =
            std::abs(static_cast<double>(query + n - kQueries - j));
        e[j] = std::exp(scores[row * n + j] / 2 + mask[query * n + j] -
                        slopes[row / kQueries] * distance);
        sum += e[j];
      }
      for (int64_t j = 0; j < n; ++j) {
        const bool stays = element_hash(column_hash<uint32_t>(j, column_key(9)),
                                        key) >= (1u << 30);
        const long double p = sum > 0 ? e[j] / sum : 0;
        this->expect_near(probs[row * n + j], p, 2);
        this->expect_near(y[row * n + j], stays ? p / 0.75L : 0, 2);
        d[j] = stays ? dy[row * n + j] / 0.75L : 0;
        dot += d[j] * probs[row * n + j];
      }
      for (int64_t j = 0; j < n; ++j) {
        this->expect_near(dscores[row * n + j],
                          (d[j] - dot) * probs[row * n + j] / 2, 4);
      }
    }
    probs.expect_guards();
    y.expect_guards();
    dscores.expect_guards();
  });
}

TYPED_TEST(Fused, DropoutKeepsWhatTheHashSaysAndRotationTurnsBack) {
  using Compute = typename TestFixture::Compute;
  constexpr int64_t kRows = 3;
  this->for_all_tables([&](const cpu::FusedTable& table, int64_t n) {
    Elements<TypeParam> x(kRows * n, 1, 1), residual(kRows * n, 2, 1),
        y(kRows * n), dx(kRows * n);
    Elements<Compute> bias(n, 3, 1), dbias(n);
    const Dropout dropout = make_dropout(0.5, 123456789012345);
    table.bias_dropout_residual_forward(
        {x.data(), bias.data(), residual.data(), y.data(), kRows, n, dropout,
         this->kDtype, this->kDtype},
        0, kRows);
    table.bias_dropout_residual_backward(
        {x.data(), dx.data(), kRows, n, dropout, this->kDtype, this->kDtype}, 0,
        kRows, dbias.data());
    for (int64_t i = 0; i < kRows * n; ++i) {
      const RowKey key = row_key(123456789012345, i / n);
      const bool stays = element_hash(column_hash<uint32_t>(
                                          i % n, column_key(123456789012345)),
                                      key) >= (1u << 31);
      this->expect_near(
          y[i], residual[i] + (stays ? 2 * (x[i] + bias[i % n]) : 0), 4);
      this->expect_near(dx[i], stays ? 2 * x[i] : 0, 0);
    }
    y.expect_guards();
    dx.expect_guards();
    dbias.expect_guards();
    // One head of n features and two features that are not turned.
    const int64_t pairs = n / 2, size = n + 2;
    Elements<TypeParam> head(kRows * size, 5, 1), turned(kRows * size),
        back(kRows * size);
    Elements<Compute> cos(kRows * pairs), sin(kRows * pairs);
    for (int64_t i = 0; i < kRows * pairs; ++i) {
      cos.set(i, std::cos(0.1 * i));
      sin.set(i, std::sin(0.1 * i));
    }
    for (bool is_interleaved : {false, true}) {
      Rotary op = {head.data(), cos.data(), sin.data(), turned.data(),  1,
                   kRows,       1,          size,       pairs,          0,
                   size,        size,       false,      is_interleaved, false,
                   this->kDtype};
      table.rotary(op, 0, kRows);
      op.x = turned.data();
      op.y = back.data();
      op.is_inverse = true;
      table.rotary(op, 0, kRows);
      for (int64_t i = 0; i < kRows * size; ++i) {
        this->expect_near(back[i], head[i], 4);
      }
      for (int64_t i = 0; i < kRows * pairs; ++i) {
        const int64_t start = i / pairs * size, pair = i % pairs;
        const int64_t a = start + (is_interleaved ? 2 * pair : pair);
        const int64_t b = is_interleaved ? a + 1 : a + pairs;
        this->expect_near(turned[a], head[a] * cos[i] - head[b] * sin[i], 4);
        this->expect_near(turned[b], head[b] * cos[i] + head[a] * sin[i], 4);
      }
      turned.expect_guards();
    }
  });
}

TYPED_TEST(Fused, CrossEntropyMatchesNaiveLoops) {
  using Compute = typename TestFixture::Compute;
  constexpr int64_t kRows = 3;
  this->for_all_tables([&](const cpu::FusedTable& table, int64_t n) {
    Elements<TypeParam> logits(kRows * n, 1, 4), dlogits(kRows * n);
    Elements<Compute> max(kRows), exp_sum(kRows), target_logit(kRows),
        sum(kRows), dloss(kRows, 2, 1);
    // The first column has number 10: one target here, one elsewhere.
    const int64_t targets[kRows] = {10 + n - 1, 3, -100};
    table.cross_entropy_forward(
        {logits.data(), targets, max.data(), exp_sum.data(),
         target_logit.data(), sum.data(), kRows, n, n, 10, n + 20, -100,
         this->kDtype},
        0, kRows);
    table.cross_entropy_backward(
        {dloss.data(), logits.data(), targets, max.data(), exp_sum.data(),
         dlogits.data(), kRows, n, n, 10, -100, n + 20, 0.1, this->kDtype},
        0, kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      long double m = logits[row * n], z = 0, total = 0;
      for (int64_t j = 1; j < n; ++j) m = std::max(m, logits[row * n + j]);
      for (int64_t j = 0; j < n; ++j) {
        z += std::exp(logits[row * n + j] - m);
        total += logits[row * n + j] - m;
      }
      ASSERT_EQ(max[row], m);
      this->expect_near(exp_sum[row], z);
      this->expect_near(sum[row], total);
      ASSERT_EQ(target_logit[row],
                row == 0 ? static_cast<long double>(static_cast<Compute>(
                               logits[row * n + n - 1] - m))
                         : 0);
      for (int64_t j = 0; j < n; ++j) {
        long double want = std::exp(logits[row * n + j] - m) / z -
                           0.1L / static_cast<long double>(n + 20);
        if (row == 0 && j == n - 1) want -= 0.9L;
        this->expect_near(dlogits[row * n + j],
                          row == 2 ? 0 : dloss[row] * want, 2);
      }
    }
    dlogits.expect_guards();
  });
}

}  // namespace
}  // namespace smp::kernels
