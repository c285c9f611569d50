#include "tests/cpp/kernels/emulated/emulated.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>

namespace smp::kernels::emulated {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// sums[c] += the sum of column c.
template <typename C>
void add_rows(const std::vector<C>& partial, int64_t first, int64_t num_rows,
              int64_t num_columns, void* sums) {
  if (sums == nullptr) return;
  for (int64_t i = 0; i < num_rows * num_columns; ++i) {
    static_cast<C*>(sums)[i % num_columns] += partial[first + i];
  }
}

// backward(partial sums), which has `num_rows` of them for each of `sums`.
template <typename C, typename Backward>
void with_sums_of(int64_t num_rows, int64_t num_columns,
                  std::vector<void*> sums, Backward&& backward) {
  const bool wanted = sums[0] != nullptr || sums.back() != nullptr;
  const int64_t each = num_rows * num_columns;
  std::vector<C> partial(each * static_cast<int64_t>(sums.size()),
                         static_cast<C>(kNan));
  expect_launched(backward(wanted ? partial.data() : nullptr));
  for (size_t i = 0; i < sums.size(); ++i) {
    add_rows(partial, static_cast<int64_t>(i) * each, num_rows, num_columns,
             sums[i]);
  }
}

template <typename Backward>
void with_sums(Dtype dtype, int64_t num_rows, int64_t num_columns,
               std::vector<void*> sums, Backward&& backward) {
  if (dtype == Dtype::kDouble) {
    with_sums_of<double>(num_rows, num_columns, sums, backward);
  } else {
    with_sums_of<float>(num_rows, num_columns, sums, backward);
  }
}

int64_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kDouble:
      return 8;
    case Dtype::kFloat:
      return 4;
    default:
      return 2;
  }
}

}  // namespace

void expect_launched(const char* error) {
  EXPECT_EQ(error, nullptr) << (error == nullptr ? "" : error);
}

void norm_backward(const NormBackward& op, void* dweight, void* dbias) {
  with_sums(
      op.dtype, cuda::norm_partial_rows(op), op.num_columns, {dweight, dbias},
      [&](void* partial) { return cuda::norm_backward(op, partial, nullptr); });
}

void bias_gelu_backward(const BiasGelu& op, void* dbias) {
  with_sums(op.dtype, cuda::column_partial_rows(op.num_rows, op.num_columns),
            op.num_columns, {dbias}, [&](void* partial) {
              return cuda::bias_gelu_backward(op, partial, nullptr);
            });
}

void bias_dropout_residual_backward(const BiasDropoutResidualBackward& op,
                                    void* dbias) {
  with_sums(op.dtype, cuda::column_partial_rows(op.num_rows, op.num_columns),
            op.num_columns, {dbias}, [&](void* partial) {
              return cuda::bias_dropout_residual_backward(op, partial, nullptr);
            });
}

Array part_of(const Array& array, int64_t begin, int64_t end) {
  return {static_cast<char*>(array.data) + begin * bytes_of(array.dtype),
          end - begin, array.dtype};
}

std::vector<double> results(Reduction reduction, const Array* arrays,
                            int64_t num_arrays) {
  std::vector<double> partials(cuda::num_partials(arrays, num_arrays), kNan);
  std::vector<double> totals(num_arrays, kNan);
  expect_launched(
      reduction(arrays, num_arrays, partials.data(), totals.data(), nullptr));
  return totals;
}

}  // namespace smp::kernels::emulated
