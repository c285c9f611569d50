#include "csrc/autograd/once.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "csrc/autograd/node.h"
#include "csrc/common/check.h"

namespace smp::autograd {

namespace {

using torch::autograd::edge_list;

// The engine passes over nodes from which no path leads to what was asked for,
// so the node that raises leads to everything that a true one might lead to:
// the gradients, and the inputs of the operator.
edge_list edges_of(const std::vector<at::Tensor>& grads) {
  edge_list edges;
  for (const at::Tensor& grad : grads) {
    if (grad.defined() && grad.requires_grad()) {
      edges.push_back(torch::autograd::impl::gradient_edge(grad));
    }
  }
  if (const auto node = torch::autograd::get_current_node()) {
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.is_valid()) edges.push_back(edge);
    }
  }
  return edges;
}

}  // namespace

std::vector<at::Tensor> once(const char* op, std::vector<at::Tensor> results,
                             const std::vector<at::Tensor>& grads) {
  if (!at::GradMode::is_enabled()) return results;
  edge_list edges = edges_of(grads);
  if (edges.empty()) return results;
  const auto error = make_node<torch::autograd::Error>(
      detail::concat(rank_prefix(), op,
                     " can be differentiated once only, and a second backward "
                     "pass reached it; compute what needs second derivatives "
                     "with the operators of PyTorch"),
      std::move(edges));
  for (at::Tensor& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    torch::autograd::set_history(result, error);
  }
  return results;
}

}  // namespace smp::autograd
