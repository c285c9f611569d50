#include "csrc/tensor_parallel/once.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <string>

#include "csrc/common/check.h"

namespace smp::tensor_parallel {

std::vector<at::Tensor> only_once(const char* what,
                                  std::vector<at::Tensor> results,
                                  const std::vector<at::Tensor>& grads) {
  const bool in_graph =
      at::GradMode::is_enabled() &&
      std::any_of(grads.begin(), grads.end(), [](const at::Tensor& grad) {
        return grad.defined() && grad.requires_grad();
      });
  if (!in_graph) return results;
  const std::string text = detail::concat(
      rank_prefix(), what,
      " has no second derivative; take the gradients of gradients outside of "
      "tensor-parallel modules, or leave this module unsplit");
  for (at::Tensor& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    torch::autograd::set_history(
        result, std::make_shared<torch::autograd::Error>(
                    text, torch::autograd::collect_next_edges(grads)));
  }
  return results;
}

}  // namespace smp::tensor_parallel
