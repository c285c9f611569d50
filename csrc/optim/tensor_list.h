#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/kernels/multi_array.h"

namespace smp::optim {

/// Raises ValueError unless each tensor is strided, on `device_type`, and of
/// dtype float32, float64, float16 or bfloat16, and all are on one device.
void check_tensors(const char* op, at::TensorList tensors,
                   c10::DeviceType device_type);

/// Raises ValueError unless each tensor fills one piece of memory.
void check_dense(const char* op, at::TensorList tensors);

/// Returns the tensors, with copies of those that are not in one piece of
/// memory.
std::vector<at::Tensor> in_one_piece(at::TensorList tensors);

kernels::Dtype kernel_dtype(c10::ScalarType type);

/// Returns views for the kernels; the tensors are dense and outlive the result.
std::vector<kernels::Array> as_arrays(at::TensorList tensors);

}  // namespace smp::optim
