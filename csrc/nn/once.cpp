#include "csrc/nn/once.h"

#include <torch/csrc/autograd/functions/basic_ops.h>

#include "csrc/common/check.h"

namespace smp::nn {

std::vector<at::Tensor> once(const char* op,
                             std::vector<at::Tensor> gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  for (at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = gradient.detach().requires_grad_();
  }
  const auto error = std::make_shared<torch::autograd::DelayedError>(
      detail::concat(rank_prefix(), op,
                     " can be differentiated once only, and a second backward "
                     "pass reached it; compute what needs second derivatives "
                     "with the operators of PyTorch"),
      static_cast<int64_t>(gradients.size()));
  return (*error)(std::move(gradients));
}

}  // namespace smp::nn
