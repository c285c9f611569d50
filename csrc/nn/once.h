#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::nn {

/// The gradients of a backward pass. If they were asked for with
/// create_graph=True, a second differentiation through them raises an error
/// that names the operator.
std::vector<at::Tensor> once(const char* op, std::vector<at::Tensor> gradients);

}  // namespace smp::nn
