#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::optim {

// torch.ops.smp.sum_of_squares and torch.ops.smp.scale_ per device; see the
// schemas in ops.cpp.

at::Tensor sum_of_squares_cpu(at::TensorList tensors);
at::Tensor sum_of_squares_cuda(at::TensorList tensors);
void scale_cpu(at::TensorList tensors, const at::Tensor& factor);
void scale_cuda(at::TensorList tensors, const at::Tensor& factor);

// Parts that the devices share.

/// Checks the list and copies what is not in one piece of memory.
std::vector<at::Tensor> prepare_sum(at::TensorList tensors,
                                    c10::DeviceType device_type);
void check_scale(at::TensorList tensors, const at::Tensor& factor,
                 c10::DeviceType device_type);
/// Tells autograd that the tensors were written to.
void bump_versions(at::TensorList tensors);

}  // namespace smp::optim
