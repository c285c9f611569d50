#include "csrc/kernels/norm.h"

#include "csrc/kernels/cpu/fused_table.h"
#include "tests/cpp/kernels/emulated/operators.h"

namespace smp::kernels::emulated {
namespace {

template <typename T>
class EmulatedNorm : public Operators<T> {};
TYPED_TEST_SUITE(EmulatedNorm, AllTypes);

TYPED_TEST(EmulatedNorm, ForwardMatchesTheCpu) {
  using C = typename TestFixture::C;
  this->for_sizes(6, [&](int form, int64_t rows, int64_t n, int64_t offset) {
    const bool is_rms = form % 2 == 1, has_weight = form < 4;
    const int64_t weight_offset = form < 2 ? 0 : 1;
    Elements<TypeParam> x(rows * n, 1, 2, offset), y(rows * n, 0, 0, offset),
        want_y(rows * n);
    Elements<C> weight(n, 2, 1, weight_offset), bias(n, 3, 1), mean(rows),
        rstd(rows), want_mean(rows), want_rstd(rows);
    Norm op = {x.data(),
               has_weight ? weight.data() : nullptr,
               has_weight && !is_rms ? bias.data() : nullptr,
               y.data(),
               is_rms ? nullptr : mean.data(),
               rstd.data(),
               rows,
               n,
               1e-3,
               is_rms,
               this->kDtype};
    this->in_all_orders(
        [&] { expect_launched(cuda::norm_forward(op, nullptr)); }, y, mean,
        rstd);
    op.y = want_y.data();
    op.mean = is_rms ? nullptr : want_mean.data();
    op.rstd = want_rstd.data();
    fused().norm_forward(op, 0, rows);
    this->expect_near(y, want_y, 4);
    this->expect_near(mean, want_mean, 1);
    this->expect_near(rstd, want_rstd, n == 1 ? 1000 : 0);
  });
}

// Every result may be left out: frozen weights, the first layer's input.
TYPED_TEST(EmulatedNorm, BackwardMatchesTheCpu) {
  using C = typename TestFixture::C;
  this->for_sizes(6, [&](int form, int64_t rows, int64_t n, int64_t offset) {
    const bool is_rms = form % 2 == 1, has_weight = form < 5;
    const bool wants_dx = form != 2, wants_sums = form != 3;
    Elements<TypeParam> x(rows * n, 1, 2, offset), dy(rows * n, 2, 1, offset),
        dx(rows * n, 0, 0, offset), want_dx(rows * n);
    Elements<C> weight(n, 3, 1, form == 4 ? 1 : 0), mean(rows), rstd(rows),
        dweight(n), dbias(n), want_dweight(n), want_dbias(n);
    fused().norm_forward({x.data(), nullptr, nullptr, want_dx.data(),
                          is_rms ? nullptr : mean.data(), rstd.data(), rows, n,
                          1e-3, is_rms, this->kDtype},
                         0, rows);
    want_dx.clear();
    NormBackward op = {dy.data(),
                       x.data(),
                       is_rms ? nullptr : mean.data(),
                       rstd.data(),
                       has_weight ? weight.data() : nullptr,
                       wants_dx ? dx.data() : nullptr,
                       rows,
                       n,
                       is_rms,
                       this->kDtype};
    this->in_all_orders(
        [&] {
          norm_backward(op, wants_sums ? dweight.data() : nullptr,
                        wants_sums ? dbias.data() : nullptr);
        },
        dx, dweight, dbias);
    op.dx = wants_dx ? want_dx.data() : nullptr;
    fused().norm_backward(op, 0, rows,
                          wants_sums ? want_dweight.data() : nullptr,
                          wants_sums ? want_dbias.data() : nullptr);
    this->expect_near(dx, want_dx, n == 1 ? 1000 : 8);
    this->expect_near(dweight, want_dweight, 16);
    this->expect_near(dbias, want_dbias, 16);
  });
}

// More rows than blocks: each goes on to others, three times here.
TEST(EmulatedNormRows, BlocksGoOnToFurtherRows) {
  constexpr int64_t kRows = 266, kColumns = 8192;
  Elements<cpu::Half> x(kRows * kColumns, 1, 2), dy(kRows * kColumns, 2, 1),
      dx(kRows * kColumns), want_dx(kRows * kColumns);
  Elements<float> weight(kColumns, 3, 1), mean(kRows), rstd(kRows, 4, 1),
      dweight(kColumns), dbias(kColumns), want_dweight(kColumns),
      want_dbias(kColumns);
  NormBackward op = {dy.data(),     x.data(),    mean.data(), rstd.data(),
                     weight.data(), dx.data(),   kRows,       kColumns,
                     false,         Dtype::kHalf};
  ASSERT_LT(cuda::norm_partial_rows(op), kRows / 2);
  // Sums that are far apart from row to row.
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    const auto level = static_cast<double>(4 * (i / kColumns % 7));
    dy.set(i, static_cast<double>(dy[i]) + level);
  }
  norm_backward(op, dweight.data(), dbias.data());
  op.dx = want_dx.data();
  fused().norm_backward(op, 0, kRows, want_dweight.data(), want_dbias.data());
  Operators<cpu::Half>::expect_near(dx, want_dx, 16);
  Operators<cpu::Half>::expect_near(dweight, want_dweight, 512);
  Operators<cpu::Half>::expect_near(dbias, want_dbias, 512);
}

}  // namespace
}  // namespace smp::kernels::emulated
