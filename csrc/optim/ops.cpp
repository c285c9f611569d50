#include "csrc/optim/ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "csrc/common/check.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/optim/tensor_list.h"

namespace smp::optim {

namespace {

constexpr const char* kSum = "smp::sum_of_squares";
constexpr const char* kScale = "smp::scale_";

at::TensorOptions double_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kDouble).device(device);
}

at::Tensor sum_of_squares_meta(at::TensorList tensors) {
  check_tensors(kSum, tensors, at::kMeta);
  return at::empty({}, double_on(at::kMeta));
}

void scale_meta(at::TensorList tensors, const at::Tensor& factor) {
  check_scale(tensors, factor, at::kMeta);
  bump_versions(tensors);
}

// Reached with an empty list, which names no device, and with tensors of a kind
// that has no kernel.
at::Tensor sum_of_squares_other(at::TensorList tensors) {
  TORCH_CHECK_VALUE(tensors.empty(), rank_prefix(), kSum,
                    " takes dense CPU or CUDA tensors, got one on ",
                    tensors[0].device(), " with layout ", tensors[0].layout());
  return at::zeros({}, double_on(at::kCPU));
}

}  // namespace

std::vector<at::Tensor> prepare_sum(at::TensorList tensors,
                                    c10::DeviceType device_type) {
  check_tensors(kSum, tensors, device_type);
  std::vector<at::Tensor> dense;
  dense.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(
        tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
  }
  return dense;
}

void check_scale(at::TensorList tensors, const at::Tensor& factor,
                 c10::DeviceType device_type) {
  check_tensors(kScale, tensors, device_type);
  check_dense(kScale, tensors);
  TORCH_CHECK_VALUE(factor.numel() == 1 && factor.is_floating_point(),
                    rank_prefix(), kScale,
                    ": factor must be one floating point number, got sizes ",
                    factor.sizes(), " of ", factor.scalar_type());
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor sum_of_squares_cpu(at::TensorList tensors) {
  const std::vector<at::Tensor> dense = prepare_sum(tensors, at::kCPU);
  const auto arrays = as_arrays(dense);
  at::Tensor result = at::empty({}, double_on(at::kCPU));
  *result.data_ptr<double>() = kernels::cpu::sum_of_squares(
      arrays.data(), static_cast<int64_t>(arrays.size()));
  return result;
}

void scale_cpu(at::TensorList tensors, const at::Tensor& factor) {
  check_scale(tensors, factor, at::kCPU);
  const auto arrays = as_arrays(tensors);
  kernels::cpu::scale(arrays.data(), static_cast<int64_t>(arrays.size()),
                      factor.item<double>());
  bump_versions(tensors);
}

// sum_of_squares: the sum of the squares of all elements, a double without
// dimensions on the device of the tensors (CPU for an empty list).
// scale_: multiplies every element by `factor`, in place.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
  m.def("scale_(Tensor(a!)[] tensors, Tensor factor) -> ()");
}

TORCH_LIBRARY_IMPL(smp, CPU, m) {
  m.impl("sum_of_squares", &sum_of_squares_cpu);
  m.impl("scale_", &scale_cpu);
}

TORCH_LIBRARY_IMPL(smp, CUDA, m) {
  m.impl("sum_of_squares", &sum_of_squares_cuda);
  m.impl("scale_", &scale_cuda);
}

TORCH_LIBRARY_IMPL(smp, Meta, m) {
  m.impl("sum_of_squares", &sum_of_squares_meta);
  m.impl("scale_", &scale_meta);
}

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) {
  m.impl("sum_of_squares", &sum_of_squares_other);
}

}  // namespace smp::optim
