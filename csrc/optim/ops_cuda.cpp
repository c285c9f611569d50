#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "csrc/common/check.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/memory/default_stream.h"
#include "csrc/optim/ops.h"
#include "csrc/optim/tensor_list.h"

namespace smp::optim {

namespace {

at::TensorOptions double_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kDouble).device(device);
}

void check_cuda(const char* op, const char* error) {
  SMP_CHECK(error == nullptr, op, " on CUDA: ", error);
}

}  // namespace

at::Tensor sum_of_squares_cuda(at::TensorList tensors) {
  const std::vector<at::Tensor> dense = prepare_sum(tensors, at::kCUDA);
  const c10::Device device = dense[0].device();
  const auto arrays = as_arrays(dense);
  const auto num_arrays = static_cast<int64_t>(arrays.size());
  at::Tensor result = at::empty({}, double_on(device));
  // Memory of the caller's stream; it is reused only after `finish`.
  const at::Tensor partial_sums =
      at::empty({kernels::cuda::num_partial_sums(arrays.data(), num_arrays)},
                double_on(device));
  memory::DefaultStream stream(device);
  check_cuda("smp::sum_of_squares",
             kernels::cuda::sum_of_squares(
                 arrays.data(), num_arrays, partial_sums.data_ptr<double>(),
                 result.data_ptr<double>(), stream.native()));
  stream.finish();
  return result;
}

void scale_cuda(at::TensorList tensors, const at::Tensor& factor) {
  check_scale(tensors, factor, at::kCUDA);
  if (tensors.empty()) return;
  const c10::Device device = tensors[0].device();
  const at::Tensor device_factor =
      factor.to(double_on(device), /*non_blocking=*/true);
  const auto arrays = as_arrays(tensors);
  memory::DefaultStream stream(device);
  check_cuda(
      "smp::scale_",
      kernels::cuda::scale(arrays.data(), static_cast<int64_t>(arrays.size()),
                           device_factor.data_ptr<double>(), stream.native()));
  stream.finish();
  bump_versions(tensors);
}

}  // namespace smp::optim
