#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::autograd {

/// The gradients that an operator's backward returns. If they were asked for
/// with create_graph=True, differentiating them once more raises an error that
/// names the operator.
/// Called at the end of that backward. As with the operators of PyTorch, a leaf
/// then has a `.grad` whose graph leads back to it, and both stay until that is
/// reset.
/// @param results  made without a graph; some may be undefined
/// @param grads    what the backward was given
std::vector<at::Tensor> once(const char* op, std::vector<at::Tensor> results,
                             const std::vector<at::Tensor>& grads);

}  // namespace smp::autograd
