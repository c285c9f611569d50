#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "csrc/kernels/multi_array.h"
#include "csrc/memory/on_devices.h"

// Checks, types, and rows over threads that the operators of this room share.

namespace smp::nn {

using OptionalTensor = std::optional<at::Tensor>;

/// Raises ValueError unless the tensor is strided and of a dtype of the
/// kernels; `name` is its name in the operator's schema.
void check_floats(const char* op, const char* name, const at::Tensor& tensor);

/// Raises ValueError unless the optional `vector` has `size` elements in one
/// dimension and lies on the device of `x`.
void check_vector(const char* op, const char* name,
                  const OptionalTensor& vector, int64_t size,
                  const at::Tensor& x);

kernels::Dtype kernel_dtype(const at::Tensor& tensor);

/// Returns double for double, float otherwise.
c10::ScalarType compute_type(const at::Tensor& tensor);

/// Returns a contiguous copy in the compute type of `x`, or the tensor itself
/// if it is one already; undefined for an absent tensor.
at::Tensor in_compute_type(const OptionalTensor& tensor, const at::Tensor& x);

inline const void* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

/// Returns a new contiguous tensor, like `x` in all but strides.
at::Tensor new_like(const at::Tensor& x);
at::Tensor new_tensor(at::IntArrayRef sizes, c10::ScalarType dtype,
                      const at::Tensor& like);

/// The elements of a tensor as rows of its last dimension.
struct Rows {
  int64_t count;
  int64_t columns;
};
Rows rows_of(const char* op, const at::Tensor& x);

/// Calls run(begin, end) for parts of the rows, on the threads of torch.
void for_rows(int64_t num_rows, int64_t num_columns,
              const std::function<void(int64_t, int64_t)>& run);

/// Calls run(begin, end, sums) for a pass that also adds up columns: it adds to
/// `sums`, [num_sums, columns] of `dtype`. Returns the total; its bits do not
/// depend on the number of threads.
at::Tensor sum_over_rows(
    int64_t num_sums, int64_t num_rows, int64_t num_columns,
    c10::ScalarType dtype,
    const std::function<void(int64_t, int64_t, char*)>& run);

/// Returns zeros on the device of `like`.
at::Tensor new_zeros(at::IntArrayRef sizes, c10::ScalarType dtype,
                     const at::Tensor& like);

/// Returns an undefined tensor as an absent one.
inline OptionalTensor given(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

}  // namespace smp::nn
