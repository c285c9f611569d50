#pragma once

#include <torch/csrc/autograd/custom_function.h>

namespace smp::nn {

/// The gradients of a backward pass. If they were asked for with
/// create_graph=True, a second differentiation through them raises an error
/// that names the operator.
torch::autograd::variable_list once(const char* op,
                                    torch::autograd::variable_list gradients);

}  // namespace smp::nn
