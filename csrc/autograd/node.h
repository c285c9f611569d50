#pragma once

#include <torch/csrc/autograd/function.h>

#include <utility>

#include "csrc/common/torch_releases.h"

namespace smp::autograd {

/// Owner of a node of autograd, as edges have it: a shared pointer, or, in
/// later releases of torch, an intrusive one.
using NodePtr = decltype(torch::autograd::Edge::function);

/// Makes a node of a class of ours.
template <typename Made, typename... Args>
NodePtr make_node(Args&&... args) {
  return own_new<NodePtr>(new Made(std::forward<Args>(args)...));
}

}  // namespace smp::autograd
