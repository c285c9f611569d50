#include "csrc/kernels/elementwise.h"

#include "csrc/kernels/cpu/fused_table.h"
#include "tests/cpp/kernels/emulated/operators.h"

namespace smp::kernels::emulated {
namespace {

template <typename T>
class EmulatedElementwise : public Operators<T> {};
TYPED_TEST_SUITE(EmulatedElementwise, AllTypes);

TYPED_TEST(EmulatedElementwise, GeluMatchesTheCpu) {
  using C = typename TestFixture::C;
  this->for_sizes(4, [&](int form, int64_t rows, int64_t n, int64_t offset) {
    Elements<TypeParam> x(rows * n, 1, 3, offset), dy(rows * n, 2, 1, offset),
        y(rows * n, 0, 0, offset), dx(rows * n, 0, 0, offset), want_y(rows * n),
        want_dx(rows * n);
    Elements<C> bias(n, 3, 1, form == 3 ? 1 : 0), dbias(n), want_dbias(n);
    BiasGelu op = {x.data(),  form == 2 ? nullptr : bias.data(),
                   nullptr,   y.data(),
                   rows,      n,
                   form == 1, this->kDtype};
    BiasGelu back = op;
    back.dy = dy.data();
    back.result = dx.data();
    this->in_all_orders(
        [&] {
          expect_launched(cuda::bias_gelu_forward(op, nullptr));
          bias_gelu_backward(back, form == 2 ? nullptr : dbias.data());
        },
        y, dx, dbias);
    op.result = want_y.data();
    back.result = want_dx.data();
    fused().bias_gelu_forward(op, 0, rows);
    fused().bias_gelu_backward(back, 0, rows,
                               form == 2 ? nullptr : want_dbias.data());
    this->expect_near(y, want_y, 1);
    this->expect_near(dx, want_dx, 4);
    this->expect_near(dbias, want_dbias, 16);
  });
}

// Y: the residual stream, which may be wider than x.
template <typename T, typename Y, typename Fixture>
void test_dropout(int form, int64_t rows, int64_t n, int64_t offset) {
  using C = typename Fixture::C;
  const bool has_bias = form != 1, has_residual = form != 2;
  Elements<T> x(rows * n, 1, 1, offset), dx(rows * n, 0, 0, offset),
      want_dx(rows * n);
  Elements<Y> residual(rows * n, 2, 1, offset), y(rows * n, 0, 0, offset),
      want_y(rows * n);
  Elements<C> bias(n, 3, 1, form == 3 ? 1 : 0), dbias(n), want_dbias(n);
  const Dropout dropout = make_dropout(form == 1 ? 0 : 0.3, 1234567890123);
  BiasDropoutResidual op = {x.data(),
                            has_bias ? bias.data() : nullptr,
                            has_residual ? residual.data() : nullptr,
                            y.data(),
                            rows,
                            n,
                            dropout,
                            DtypeOf<T>::value,
                            DtypeOf<Y>::value};
  BiasDropoutResidualBackward back = {
      residual.data(),   dx.data(),         rows, n, dropout,
      DtypeOf<T>::value, DtypeOf<Y>::value,
  };
  Fixture::in_all_orders(
      [&] {
        expect_launched(cuda::bias_dropout_residual_forward(op, nullptr));
        bias_dropout_residual_backward(back, has_bias ? dbias.data() : nullptr);
      },
      y, dx, dbias);
  op.y = want_y.data();
  back.dx = want_dx.data();
  fused().bias_dropout_residual_forward(op, 0, rows);
  fused().bias_dropout_residual_backward(
      back, 0, rows, has_bias ? want_dbias.data() : nullptr);
  Fixture::expect_near(y, want_y, 2);
  Fixture::expect_near(dx, want_dx, 0);
  Fixture::expect_near(dbias, want_dbias, 8);
}

TYPED_TEST(EmulatedElementwise, DropoutMatchesTheCpu) {
  this->for_sizes(4, [&](int form, int64_t rows, int64_t n, int64_t offset) {
    test_dropout<TypeParam, TypeParam, Operators<TypeParam>>(form, rows, n,
                                                             offset);
    if constexpr (sizeof(TypeParam) == 2) {
      test_dropout<TypeParam, float, Operators<TypeParam>>(form, rows, n,
                                                           offset);
    }
  });
}

// Many rows for few columns: blocks go down the rows several times.
TYPED_TEST(EmulatedElementwise, ThreadsGoOnToFurtherRows) {
  using C = typename TestFixture::C;
  constexpr int64_t kRows = 17000, kFew = 8;
  Elements<TypeParam> x(kRows * kFew, 1, 1), dx(kRows * kFew),
      want_dx(kRows * kFew);
  Elements<C> dbias(kFew), want_dbias(kFew);
  BiasDropoutResidualBackward op = {
      x.data(),     dx.data(),    kRows, kFew, make_dropout(0.5, 7),
      this->kDtype, this->kDtype,
  };
  this->in_all_orders([&] { bias_dropout_residual_backward(op, dbias.data()); },
                      dx, dbias);
  op.dx = want_dx.data();
  fused().bias_dropout_residual_backward(op, 0, kRows, want_dbias.data());
  this->expect_near(dx, want_dx, 0);
  this->expect_near(dbias, want_dbias, 1000);
}

struct Heads {
  int64_t num_heads, head_size, num_pairs;
  int64_t head_gap, length_gap;  // elements of a view that lie between
};

// The sizes of GPT-J and of a head that is turned as a whole, and odd ones.
constexpr Heads kHeads[] = {
    {16, 256, 32, 0, 0}, {3, 128, 64, 0, 768}, {1, 2, 1, 0, 0},
    {3, 33, 16, 0, 0},   {2, 31, 7, 1, 3},     {2, 1000, 500, 0, 8},
    {2, 127, 1, 0, 0},   {3, 80, 8, 80, 160},  {2, 64, 20, 0, 0}};

TYPED_TEST(EmulatedElementwise, RotationMatchesTheCpu) {
  using C = typename TestFixture::C;
  constexpr int64_t kBatch = 2, kLength = 5;
  for (const Heads& h : kHeads) {
    for (int form = 0; form < 8; ++form) {
      const int64_t offset = form / 4;
      SCOPED_TRACE("head size " + std::to_string(h.head_size) + ", form " +
                   std::to_string(form));
      const int64_t head_stride = h.head_size + h.head_gap;
      const int64_t length_stride = h.num_heads * head_stride + h.length_gap;
      const int64_t size = kBatch * kLength * h.num_heads * h.head_size;
      Elements<TypeParam> x(kBatch * kLength * length_stride, 1, 1, offset),
          y(size, 0, 0, offset), want_y(size);
      Elements<C> cos(kBatch * kLength * h.num_pairs, 2, 1, form == 3 ? 1 : 0),
          sin(kBatch * kLength * h.num_pairs, 3, 1);
      Rotary op;
      op.x = x.data();
      op.cos = cos.data();
      op.sin = sin.data();
      op.y = y.data();
      op.batch_size = kBatch;
      op.length = kLength;
      op.num_heads = h.num_heads;
      op.head_size = h.head_size;
      op.num_pairs = h.num_pairs;
      op.batch_stride = kLength * length_stride;
      op.length_stride = length_stride;
      op.head_stride = head_stride;
      op.is_table_per_sample = form % 4 >= 2;
      op.is_interleaved = form % 2 == 1;
      op.is_inverse = form % 4 == 1;
      op.dtype = this->kDtype;
      this->in_all_orders([&] { expect_launched(cuda::rotary(op, nullptr)); },
                          y);
      op.y = want_y.data();
      fused().rotary(op, 0, kBatch * kLength);
      this->expect_near(y, want_y, 2);
    }
  }
}

// More positions than a grid has blocks in this direction.
TEST(EmulatedRotation, BlocksGoOnToFurtherPositions) {
  constexpr int64_t kLength = 65535 + 100;
  Elements<float> x(kLength * 2, 1, 1), y(kLength * 2), want_y(kLength * 2),
      cos(kLength, 2, 1), sin(kLength, 3, 1);
  Rotary op;
  op.x = x.data();
  op.cos = cos.data();
  op.sin = sin.data();
  op.y = y.data();
  op.batch_size = 1;
  op.length = kLength;
  op.num_heads = 1;
  op.head_size = 2;
  op.num_pairs = 1;
  op.length_stride = 2;
  expect_launched(cuda::rotary(op, nullptr));
  op.y = want_y.data();
  fused().rotary(op, 0, kLength);
  Operators<float>::expect_near(y, want_y, 2);
}

}  // namespace
}  // namespace smp::kernels::emulated
