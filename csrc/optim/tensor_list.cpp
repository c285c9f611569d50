#include "csrc/optim/tensor_list.h"

#include <c10/util/Exception.h>

#include "csrc/common/check.h"

namespace smp::optim {

namespace {

bool is_supported(c10::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
         type == at::kBFloat16;
}

}  // namespace

void check_tensors(const char* op, at::TensorList tensors,
                   c10::DeviceType device_type) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided,
                      rank_prefix(), op, ": tensor ", i,
                      " must be a dense (strided) tensor; convert it with "
                      ".to_dense() first");
    TORCH_CHECK_VALUE(
        is_supported(tensor.scalar_type()), rank_prefix(), op, ": tensor ", i,
        " must be float32, float64, float16 or bfloat16, got ",
        tensor.scalar_type(), "; leave such tensors out of the list");
    TORCH_CHECK_VALUE(tensor.device().type() == device_type &&
                          tensor.device() == tensors[0].device(),
                      rank_prefix(), op,
                      ": all tensors must be on one device; tensor 0 is ",
                      "on ", tensors[0].device(), ", tensor ", i, " on ",
                      tensor.device(), "; call once per device");
  }
}

void check_dense(const char* op, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(
        tensors[i].is_non_overlapping_and_dense(), rank_prefix(), op,
        ": tensor ", i, " with sizes ", tensors[i].sizes(), " and strides ",
        tensors[i].strides(),
        " does not fill one piece of memory; pass a contiguous tensor");
  }
}

std::vector<at::Tensor> in_one_piece(at::TensorList tensors) {
  std::vector<at::Tensor> dense;
  dense.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(
        tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
  }
  return dense;
}

kernels::Dtype kernel_dtype(c10::ScalarType type) {
  if (type == at::kDouble) return kernels::Dtype::kDouble;
  if (type == at::kHalf) return kernels::Dtype::kHalf;
  if (type == at::kBFloat16) return kernels::Dtype::kBFloat16;
  return kernels::Dtype::kFloat;
}

std::vector<kernels::Array> as_arrays(at::TensorList tensors) {
  std::vector<kernels::Array> arrays;
  arrays.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    arrays.push_back({tensor.data_ptr(), tensor.numel(),
                      kernel_dtype(tensor.scalar_type())});
  }
  return arrays;
}

}  // namespace smp::optim
