#include "csrc/autograd/once.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

namespace smp::autograd {
namespace {

using Tensors = std::vector<at::Tensor>;

std::string error_of(const at::Tensor& result, const at::Tensor& input) {
  try {
    torch::autograd::grad({result.sum()}, {input}, {}, std::nullopt, false,
                          /*allow_unused=*/true);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Once, PassesGradientsThatNobodyDifferentiates) {
  const at::Tensor gradient = at::ones({2});
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  {
    const at::NoGradGuard no_grad;
    const Tensors results = once("op", {gradient, at::Tensor()}, {leaf});
    EXPECT_TRUE(results[0].is_same(gradient));
    EXPECT_FALSE(results[1].defined());
  }
  const at::AutoGradMode grad_mode(true);
  EXPECT_FALSE(once("op", {gradient}, {at::ones({2})})[0].requires_grad());
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x) {
    context->save_for_backward({x});
    return x.detach().mul(x.detach());
  }
  static Tensors backward(torch::autograd::AutogradContext* context,
                          const Tensors& grads) {
    const at::Tensor x = context->get_saved_variables()[0].detach();
    return once("my_operator", {grads[0].detach().mul(x).mul(2)}, grads);
  }
};

TEST(Once, NamesTheOperatorOnEveryPathBack) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor weight = at::ones({2}).requires_grad_();
  const at::Tensor y = Square::apply(x);
  for (const bool weighs : {false, true}) {
    const at::Tensor dx = torch::autograd::grad(
        {y}, {x}, {weighs ? weight : at::ones({2})}, true, true)[0];
    EXPECT_TRUE(dx.detach().equal(at::full({2}, 2.0)));
    const at::Tensor& asked = weighs ? weight : x;
    EXPECT_NE(
        error_of(dx, asked).find("my_operator can be differentiated once only"),
        std::string::npos)
        << "weighs " << weighs;
  }
}

}  // namespace
}  // namespace smp::autograd
