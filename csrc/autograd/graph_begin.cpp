#include "csrc/autograd/graph_begin.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

#include "csrc/common/check.h"

namespace smp::autograd {

namespace {

class ArgumentNode : public torch::autograd::Node {
 public:
  std::string name() const override { return "SmpArgumentBackward"; }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) override {
    grad = std::move(grads[0]);
    return {};
  }

  at::Tensor grad;
};

}  // namespace

NodePtr begin_graph(at::Tensor& argument) {
  auto node = make_node<ArgumentNode>();
  torch::autograd::create_gradient_edge(argument, node);
  return node;
}

at::Tensor take_grad(torch::autograd::Node& node) {
  auto* const argument = dynamic_cast<ArgumentNode*>(&node);
  SMP_ASSERT(argument, "not the beginning of a graph: ", node.name());
  return std::exchange(argument->grad, {});
}

}  // namespace smp::autograd
