#include "csrc/autograd/graph_begin.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

namespace smp::autograd {
namespace {

TEST(BeginGraph, takes_the_gradient_and_keeps_no_argument) {
  at::Tensor argument = at::ones({2});
  const auto node = begin_graph(argument);
  const at::Tensor result = argument * 3;
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(
      argument.getIntrusivePtr());
  argument.reset();
  EXPECT_TRUE(weak.expired()) << "a product with a number keeps no factor";
  torch::autograd::backward({result}, {at::ones({2})});
  EXPECT_TRUE(take_grad(*node).equal(at::full({2}, 3.0)));
  EXPECT_FALSE(take_grad(*node).defined()) << "once";
}

}  // namespace
}  // namespace smp::autograd
