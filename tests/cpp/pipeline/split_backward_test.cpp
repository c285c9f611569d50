// A backward in two parts gives what one gives.

#include "csrc/pipeline/split_backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace smp::pipeline {
namespace {

using torch::autograd::variable_list;

at::Tensor leaf(int rows) {
  return at::rand({rows, 4}, at::kDouble).set_requires_grad(true);
}

struct Model {
  at::Tensor w1 = leaf(4);
  at::Tensor w2 = leaf(4);
  at::Tensor gain = leaf(1);
  at::Tensor x = leaf(3);
  at::Tensor y = leaf(3);

  std::vector<at::Tensor> params() const { return {w1, w2, gain}; }
  std::vector<at::Tensor> inputs() const { return {x, y}; }
  std::vector<GraphEdge> input_edges() const {
    return {GraphEdge::of(x), GraphEdge::of(y)};
  }

  void clear() {
    for (at::Tensor t : {w1, w2, gain, x, y}) t.mutable_grad() = at::Tensor();
  }
};

struct Grads {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> params;
};

using Forward = std::function<at::Tensor(const Model&)>;

std::vector<at::Tensor> grads_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& t : tensors) {
    grads.push_back(t.grad().defined() ? t.grad().clone() : at::Tensor());
  }
  return grads;
}

Grads in_one_part(Model& model, const Forward& forward) {
  model.clear();
  const at::Tensor out = forward(model);
  torch::autograd::backward({out}, {at::ones_like(out)});
  return {grads_of(model.inputs()), grads_of(model.params())};
}

void expect_equal(const std::vector<at::Tensor>& got,
                  const std::vector<at::Tensor>& expected, const char* what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << what << " " << i;
    if (got[i].defined()) {
      EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-12, 1e-12))
          << what << " " << i;
    }
  }
}

void expect_same_in_two_parts(const Forward& forward) {
  Model model;
  const Grads expected = in_one_part(model, forward);
  model.clear();
  std::optional<InputBackward> first;
  {
    const at::Tensor out = forward(model);
    first = run_input_backward({GraphEdge::of(out)}, {at::ones_like(out)},
                               model.input_edges());
  }
  ASSERT_TRUE(first);
  expect_equal(first->input_grads, expected.inputs, "input");
  for (const at::Tensor& param : model.params()) {
    EXPECT_FALSE(param.grad().defined()) << "parameters come later";
  }
  first->add_weight_grads();
  expect_equal(grads_of(model.params()), expected.params, "parameter");
  for (const at::Tensor& input : model.inputs()) {
    EXPECT_FALSE(input.grad().defined());
  }
}

TEST(SplitBackward, a_chain_of_layers) {
  expect_same_in_two_parts([](const Model& m) {
    return at::linear(at::gelu(at::linear(m.x, m.w1)), m.w2) * m.gain + m.y;
  });
}

TEST(SplitBackward, a_parameter_that_is_used_several_times) {
  expect_same_in_two_parts([](const Model& m) {
    at::Tensor h = at::tanh(at::linear(m.x, m.w1));
    h = h + at::linear(h, m.w1);
    return at::linear(h, m.w1) * at::linear(m.y, m.w2);
  });
}

TEST(SplitBackward, weights_that_are_computed) {
  expect_same_in_two_parts([](const Model& m) {
    const at::Tensor w = at::tanh(m.w1 * m.gain) + m.w2;
    return at::linear(at::linear(m.x, w), w);
  });
}

TEST(SplitBackward, residual_and_branches) {
  expect_same_in_two_parts([](const Model& m) {
    const at::Tensor h = m.x + at::linear(at::gelu(m.x), m.w1);
    const std::vector<at::Tensor> parts{h + m.y, at::linear(h, m.w2), m.x};
    return at::cat(parts, 0);
  });
}

TEST(SplitBackward, a_result_of_parameters_alone) {
  expect_same_in_two_parts(
      [](const Model& m) { return at::linear(m.w1, m.w2) * m.gain; });
}

// Computes all gradients at once, whatever is asked for, and counts.
struct Counting : torch::autograd::Function<Counting> {
  static inline int num_calls = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return at::mul(x, w);
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                variable_list grads) {
    ++num_calls;
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum_to_size({1, 4})};
  }
};

TEST(SplitBackward, a_function_of_somebody_else_runs_once) {
  const Forward forward = [](const Model& m) {
    return Counting::apply(at::linear(m.x, m.w1), m.gain) + m.y;
  };
  Counting::num_calls = 0;
  expect_same_in_two_parts(forward);
  EXPECT_EQ(Counting::num_calls, 2) << "once in one part, once in two";
}

TEST(SplitBackward, what_two_functions_give_to_one_parameter) {
  expect_same_in_two_parts([](const Model& m) {
    return Counting::apply(Counting::apply(m.x, m.gain), m.gain) + m.y;
  });
}

// Expects that a graph stays whole: its parts cannot be told apart, so nothing
// is run.
void expect_whole(const Forward& forward) {
  Model model;
  const at::Tensor out = forward(model);
  EXPECT_FALSE(run_input_backward({GraphEdge::of(out)}, {at::ones_like(out)},
                                  model.input_edges()));
  torch::autograd::backward({out}, {at::ones_like(out)});  // still possible
}

TEST(SplitBackward, graphs_that_stay_whole) {
  expect_whole([](const Model& m) { return at::gelu(m.x) + m.y; });
  expect_whole([](const Model& m) {
    const at::Tensor h = at::linear(m.x, m.w1);
    h.register_hook([](const at::Tensor& grad) { return grad; });
    return h;
  });
  expect_whole([](const Model& m) {  // the same weight in both ways
    return Counting::apply(m.x, m.gain) * m.gain;
  });
}

class Foreign : public torch::autograd::Node {
 public:
  using Node::Node;
  std::string name() const override { return "SmpRemoteCallBackward"; }
  variable_list apply(variable_list&& grads) override {
    return std::move(grads);
  }
};

TEST(SplitBackward, calls_of_other_ranks_stay_whole) {
  expect_whole([](const Model& m) {
    at::Tensor h = at::linear(m.x, m.w1);
    at::Tensor away = h.detach();
    torch::autograd::create_gradient_edge(
        away,
        autograd::make_node<Foreign>(torch::autograd::collect_next_edges(h)));
    return away;
  });
}

TEST(SplitBackward, a_broadcast_gradient_becomes_dense) {
  Model model;
  const at::Tensor out = at::linear(model.x, model.w1) + model.y;
  const auto first = run_input_backward(
      {GraphEdge::of(out)}, {at::ones_like(out).sum().expand_as(out)},
      model.input_edges());
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->input_grads[1].is_non_overlapping_and_dense());
}

}  // namespace
}  // namespace smp::pipeline
