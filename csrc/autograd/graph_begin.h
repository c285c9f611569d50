#pragma once

#include <ATen/core/Tensor.h>

#include "csrc/autograd/node.h"

namespace smp::autograd {

/// Makes a graph begin at `argument`, which has none yet: the node takes the
/// gradient. A leaf would do the same, but keep the data of the argument for as
/// long as the graph lives, and refuse to be written to.
NodePtr begin_graph(at::Tensor& argument);
/// The gradient that came to a node of `begin_graph`; undefined if none did.
at::Tensor take_grad(torch::autograd::Node& node);

}  // namespace smp::autograd
