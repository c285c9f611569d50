#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::tensor_parallel {

/// Lets nobody differentiate a gradient once more: results that would be part
/// of a graph get a node there that raises.
/// @param results  of a backward, made without a graph; some undefined
/// @param grads  what the backward was given
std::vector<at::Tensor> only_once(const char* what,
                                  std::vector<at::Tensor> results,
                                  const std::vector<at::Tensor>& grads);

}  // namespace smp::tensor_parallel
