#include "csrc/nn/tensors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::nn {

void check_floats(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, rank_prefix(), op, ": ",
                    name, " must be a dense (strided) tensor, got layout ",
                    tensor.layout());
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble ||
                        type == at::kHalf || type == at::kBFloat16,
                    rank_prefix(), op, ": ", name,
                    " must be float32, float64, float16 or bfloat16, got ",
                    type);
}

void check_vector(const char* op, const char* name,
                  const OptionalTensor& vector, int64_t size,
                  const at::Tensor& x) {
  if (!vector.has_value()) return;
  check_floats(op, name, *vector);
  TORCH_CHECK_VALUE(vector->dim() == 1 && vector->size(0) == size,
                    rank_prefix(), op, ": ", name, " must have sizes [", size,
                    "], as the input has sizes ", x.sizes(), ", got ",
                    vector->sizes());
  TORCH_CHECK_VALUE(vector->device() == x.device(), rank_prefix(), op, ": ",
                    name, " is on ", vector->device(), ", the input on ",
                    x.device(), "; move one of them");
}

kernels::Dtype kernel_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return kernels::Dtype::kDouble;
    case at::kHalf:
      return kernels::Dtype::kHalf;
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    default:
      return kernels::Dtype::kFloat;
  }
}

c10::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor in_compute_type(const OptionalTensor& tensor, const at::Tensor& x) {
  if (!tensor.has_value()) return {};
  return tensor->to(compute_type(x)).contiguous();
}

at::Tensor new_like(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

at::Tensor new_tensor(at::IntArrayRef sizes, c10::ScalarType dtype,
                      const at::Tensor& like) {
  return at::empty(sizes, like.options().dtype(dtype));
}

Rows rows_of(const char* op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 0, rank_prefix(), op,
                    ": the input must have at least one dimension, got a "
                    "tensor without any");
  const int64_t columns = x.size(-1);
  return {columns == 0 ? 0 : x.numel() / columns, columns};
}

void for_rows(int64_t num_rows, int64_t num_columns,
              const std::function<void(int64_t, int64_t)>& run) {
  constexpr int64_t kGrain = 32768;
  const int64_t grain = kGrain / std::max<int64_t>(num_columns, 1);
  at::parallel_for(0, num_rows, std::max<int64_t>(grain, 1), run);
}

at::Tensor sum_over_rows(
    int64_t num_sums, int64_t num_rows, int64_t num_columns,
    c10::ScalarType dtype,
    const std::function<void(int64_t, int64_t, char*)>& run) {
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

at::Tensor new_zeros(at::IntArrayRef sizes, c10::ScalarType dtype,
                     const at::Tensor& like) {
  return at::zeros(sizes, like.options().dtype(dtype));
}

}  // namespace smp::nn
