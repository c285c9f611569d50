#include "tests/cpp/kernels/implementations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/cpp/kernels/emulated/emulated.h"

// The CUDA kernels as tables, one per order of threads. They always do all
// rows. The updates of optimizers have other parameters on a GPU, and tests of
// their own.

namespace smp::kernels {

namespace {

using emulated::expect_launched;
using emulated::InOrder;
using emulated::Order;

void expect_all(int64_t begin, int64_t end, int64_t num_rows) {
  EXPECT_EQ(begin, 0);
  EXPECT_EQ(end, num_rows);
}

template <Order kOrder>
void norm_forward(const Norm& op, int64_t begin, int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::norm_forward(op, nullptr));
}

template <Order kOrder>
void norm_backward(const NormBackward& op, int64_t begin, int64_t end,
                   void* dweight, void* dbias) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  emulated::norm_backward(op, dweight, dbias);
}

template <Order kOrder>
void bias_gelu_forward(const BiasGelu& op, int64_t begin, int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::bias_gelu_forward(op, nullptr));
}

template <Order kOrder>
void bias_gelu_backward(const BiasGelu& op, int64_t begin, int64_t end,
                        void* dbias) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  emulated::bias_gelu_backward(op, dbias);
}

template <Order kOrder>
void dropout_forward(const BiasDropoutResidual& op, int64_t begin,
                     int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::bias_dropout_residual_forward(op, nullptr));
}

template <Order kOrder>
void dropout_backward(const BiasDropoutResidualBackward& op, int64_t begin,
                      int64_t end, void* dbias) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  emulated::bias_dropout_residual_backward(op, dbias);
}

template <Order kOrder>
void rotary(const Rotary& op, int64_t begin, int64_t end) {
  expect_all(begin, end, op.batch_size * op.length);
  const InOrder in_order(kOrder);
  expect_launched(cuda::rotary(op, nullptr));
}

template <Order kOrder>
void softmax_forward(const ScaledMaskedSoftmax& op, int64_t begin,
                     int64_t end) {
  expect_all(begin, end, op.batch_size * op.num_heads * op.num_queries);
  const InOrder in_order(kOrder);
  expect_launched(cuda::softmax_forward(op, nullptr));
}

template <Order kOrder>
void softmax_backward(const ScaledMaskedSoftmaxBackward& op, int64_t begin,
                      int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::softmax_backward(op, nullptr));
}

template <Order kOrder>
void cross_entropy_forward(const CrossEntropy& op, int64_t begin, int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::cross_entropy_forward(op, nullptr));
}

template <Order kOrder>
void cross_entropy_backward(const CrossEntropyBackward& op, int64_t begin,
                            int64_t end) {
  expect_all(begin, end, op.num_rows);
  const InOrder in_order(kOrder);
  expect_launched(cuda::cross_entropy_backward(op, nullptr));
}

template <Order kOrder>
double sum_of_squares(const Array& array, int64_t begin, int64_t end) {
  const InOrder in_order(kOrder);
  const Array part = emulated::part_of(array, begin, end);
  return emulated::results(cuda::sums_of_squares, &part, 1)[0];
}

template <Order kOrder>
double max_abs(const Array& array, int64_t begin, int64_t end) {
  const InOrder in_order(kOrder);
  const Array part = emulated::part_of(array, begin, end);
  return emulated::results(cuda::max_abs, &part, 1)[0];
}

template <Order kOrder>
void scale(const Array& array, double factor, int64_t begin, int64_t end) {
  const InOrder in_order(kOrder);
  const Array part = emulated::part_of(array, begin, end);
  expect_launched(cuda::scale(&part, 1, &factor, nullptr));
}

template <Order kOrder>
constexpr cpu::FusedTable kTable = {norm_forward<kOrder>,
                                    norm_backward<kOrder>,
                                    bias_gelu_forward<kOrder>,
                                    bias_gelu_backward<kOrder>,
                                    dropout_forward<kOrder>,
                                    dropout_backward<kOrder>,
                                    rotary<kOrder>,
                                    softmax_forward<kOrder>,
                                    softmax_backward<kOrder>,
                                    cross_entropy_forward<kOrder>,
                                    cross_entropy_backward<kOrder>,
                                    sum_of_squares<kOrder>,
                                    max_abs<kOrder>,
                                    scale<kOrder>,
                                    nullptr,
                                    nullptr,
                                    nullptr,
                                    nullptr,
                                    nullptr};

}  // namespace

const cpu::FusedTable* const* implementations() {
  static const cpu::FusedTable* const tables[] = {
      &kTable<Order::kForward>, &kTable<Order::kBackward>,
      &kTable<Order::kRandom>, nullptr};
  return tables;
}

}  // namespace smp::kernels
