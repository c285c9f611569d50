#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "csrc/kernels/multi_array.h"

// What the operators of this room share: checks, types, rows over threads.

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

/// double for double, float otherwise.
c10::ScalarType compute_type(const at::Tensor& tensor);

/// A contiguous copy in the compute type of `x`, the tensor itself if it is
/// one already; undefined for nothing.
at::Tensor in_compute_type(const OptionalTensor& tensor, const at::Tensor& x);

inline const void* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

/// A contiguous result, like `x` in all but strides.
at::Tensor new_like(const at::Tensor& x);
at::Tensor new_tensor(at::IntArrayRef sizes, c10::ScalarType dtype,
                      const at::Tensor& like);

/// The elements of a tensor as rows of its last dimension.
struct Rows {
  int64_t count;
  int64_t columns;
};
Rows rows_of(const char* op, const at::Tensor& x);

/// run(begin, end) for parts of the rows, on the threads of torch.
template <typename Run>
void for_rows(int64_t num_rows, int64_t num_columns, const Run& run) {
  constexpr int64_t kGrain = 32768;
  const int64_t grain = kGrain / std::max<int64_t>(num_columns, 1);
  at::parallel_for(0, num_rows, std::max<int64_t>(grain, 1), run);
}

/// The same for a pass that also adds up columns: run(begin, end, sums) adds to
/// `sums`, [num_sums, columns] of `dtype`. The result is the total; its bits do
/// not depend on the number of threads.
template <typename Run>
at::Tensor sum_over_rows(int64_t num_sums, int64_t num_rows,
                         int64_t num_columns, c10::ScalarType dtype,
                         const Run& run) {
  constexpr int64_t kGrain = 65536;
  constexpr int64_t kMaxChunks = 16;
  const int64_t chunks = std::max<int64_t>(
      1, std::min({kMaxChunks, num_rows, num_rows * num_columns / kGrain}));
  const at::Tensor sums = at::zeros({chunks, num_sums, num_columns}, dtype);
  char* data = static_cast<char*>(sums.mutable_data_ptr());
  const int64_t chunk_bytes =
      num_sums * num_columns * static_cast<int64_t>(sums.element_size());
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      run(num_rows * chunk / chunks, num_rows * (chunk + 1) / chunks,
          data + chunk * chunk_bytes);
    }
  });
  return chunks == 1 ? sums.select(0, 0) : sums.sum(0);
}

/// Queues kernels on the device of `x` and raises what went wrong;
/// launch(stream) returns nullptr or a text.
void run_on_cuda(const char* op, const at::Tensor& x,
                 const std::function<const char*(void*)>& launch);

/// An undefined tensor as an absent one.
inline OptionalTensor given(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

/// A typed handle of an operator of ours.
template <typename Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

}  // namespace smp::nn

/// Registers what is in `body`, calls of m.impl(), for tensors of all devices:
/// an operator of this room asks its input where it is.
#define SMP_IMPL_ON_ALL_DEVICES(m, body)                                \
  TORCH_LIBRARY_IMPL(smp, CPU, m) body TORCH_LIBRARY_IMPL(smp, CUDA, m) \
  body TORCH_LIBRARY_IMPL(smp, Meta, m) body
