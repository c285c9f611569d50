#include "csrc/memory/recompute.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/memory/activation_store.h"
#include "csrc/memory/random_state.h"

namespace smp::memory {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kSize = 32;

struct Model {
  at::Tensor weight = at::randn({kSize, kSize}).requires_grad_();
  int num_runs = 0;
  int num_recomputed = 0;

  RecomputedFunction function() {
    return [this](Tensors inputs) -> Tensors {
      ++num_runs;
      num_recomputed += is_recomputing();
      const at::Tensor hidden = at::tanh(at::matmul(inputs[0], weight));
      return {at::dropout(hidden, 0.5, true), hidden.sum(-1)};
    };
  }
};

struct Outcome {
  at::Tensor result;
  at::Tensor input_grad;
  at::Tensor weight_grad;
};

// Two recomputed calls behind each other with a random number between them.
Outcome train(Model& model, const at::Tensor& data, bool checkpoints,
              const std::shared_ptr<ActivationStore>& store = nullptr) {
  seed_generators(5, c10::Device(c10::DeviceType::CPU));
  at::Tensor input = data.clone().requires_grad_();
  at::Tensor hidden = input * 2.0;
  at::Tensor result;
  for (int i = 0; i < 2; ++i) {
    Tensors results;
    if (checkpoints) {
      RecomputeOptions options;
      options.store = store;
      results = recompute(model.function(), {hidden}, options);
    } else {
      results = model.function()({hidden});
    }
    hidden = results[0] * at::randn({kSize});
    result = result.defined() ? result + results[1].sum() : results[1].sum();
  }
  result = result + hidden.sum();
  model.weight.mutable_grad() = at::Tensor();
  torch::autograd::backward({result});
  return {result.detach(), input.grad(), model.weight.grad()};
}

void expect_equal(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(at::equal(a.result, b.result));
  EXPECT_TRUE(at::equal(a.input_grad, b.input_grad));
  EXPECT_TRUE(at::equal(a.weight_grad, b.weight_grad));
  EXPECT_GT(b.weight_grad.abs().max().item<double>(), 1e-3);
}

TEST(Recompute, equals_the_plain_run_bit_by_bit) {
  Model model;
  const at::Tensor data = at::randn({4, kSize});
  const Outcome plain = train(model, data, false);
  EXPECT_EQ(std::exchange(model.num_runs, 0), 2);
  expect_equal(train(model, data, true), plain);
  EXPECT_EQ(model.num_runs, 4);
  EXPECT_EQ(model.num_recomputed, 2);
  EXPECT_FALSE(is_recomputing());
}

TEST(Recompute, equals_it_with_offloading_too) {
  Model model;
  const at::Tensor data = at::randn({4, kSize});
  const Outcome plain = train(model, data, false);
  ActivationStore::Options options;
  options.min_bytes = 64;
  options.horizon = 1;
  const auto store = std::make_shared<ActivationStore>(options);
  for (int i = 0; i < 3; ++i)
    expect_equal(train(model, data, true, store), plain);
  EXPECT_GE(store->stats().num_offloaded, 4);
  EXPECT_EQ(store->stats().num_recomputed, 6);
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
}

TEST(Recompute, keeps_nothing_but_inputs) {
  const at::Tensor input = at::randn({4, kSize}).requires_grad_();
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> inner(
      at::ones({1}).getIntrusivePtr());
  const Tensors results = recompute(
      [&](Tensors inputs) -> Tensors {
        const at::Tensor hidden = at::tanh(inputs[0]);
        inner = decltype(inner)(hidden.getIntrusivePtr());
        return {at::tanh(hidden)};
      },
      {input}, {});
  EXPECT_TRUE(inner.expired());
  torch::autograd::backward({results[0].sum()});
  EXPECT_TRUE(input.grad().defined());
}

TEST(Recompute, what_needs_no_gradient_stays_so) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  const at::Tensor mask = at::ones({2});
  const Tensors results = recompute(
      [](Tensors inputs) -> Tensors {
        return {inputs[0] * inputs[1], inputs[1], inputs[0], at::Tensor(),
                at::ones({2}, at::kLong)};
      },
      {input, mask}, {});
  EXPECT_TRUE(results[0].requires_grad());
  EXPECT_TRUE(results[1].is_same(mask));
  EXPECT_TRUE(results[2].is_same(input));
  EXPECT_FALSE(results[3].defined());
  EXPECT_FALSE(results[4].requires_grad());
  torch::autograd::backward({(results[0] * results[2]).sum()});
  EXPECT_TRUE(at::equal(input.grad(), input.detach() * 2));
}

TEST(Recompute, is_a_plain_call_without_gradients) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  int runs = 0;
  const RecomputedFunction function = [&](Tensors inputs) -> Tensors {
    ++runs;
    return {inputs[0] * 2};
  };
  {
    const at::AutoGradMode no_grad(false);
    EXPECT_FALSE(recompute(function, {input}, {})[0].requires_grad());
  }
  RecomputeOptions options;
  options.needs_grad = false;
  EXPECT_FALSE(
      recompute(function, {input.detach()}, options)[0].requires_grad());
  EXPECT_EQ(runs, 2);
}

TEST(Recompute, parameters_get_gradients_though_no_input_does) {
  Model model;
  const Tensors results =
      recompute(model.function(), {at::randn({4, kSize})}, {});
  torch::autograd::backward({results[0].sum()});
  EXPECT_TRUE(model.weight.grad().defined());
}

TEST(Recompute, nested_checkpoints_compute_again_once_more) {
  Model model;
  const at::Tensor data = at::randn({4, kSize});
  const at::Tensor input = data.clone().requires_grad_();
  const Tensors results = recompute(
      [&](Tensors inputs) {
        return recompute(model.function(), {inputs[0] * 2.0}, {});
      },
      {input}, {});
  torch::autograd::backward({results[1].sum()});
  EXPECT_EQ(model.num_runs, 3);
  const at::Tensor plain = data.clone().requires_grad_();
  torch::autograd::backward({model.function()({plain * 2.0})[1].sum()});
  EXPECT_TRUE(at::equal(input.grad(), plain.grad()));
}

TEST(Recompute, runs_again_under_its_own_task) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  std::vector<int> mbs;
  Tensors results;
  {
    const TaskScope scope({1, 7});
    results = recompute(
        [&](Tensors inputs) -> Tensors {
          mbs.push_back(current_task().mb);
          return {inputs[0] * 2};
        },
        {input}, {});
  }
  torch::autograd::backward({results[0].sum()});
  EXPECT_EQ(mbs, (std::vector<int>{7, 7}));
}

TEST(Recompute, a_second_backward_needs_a_kept_graph) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  const auto twice = [](Tensors inputs) -> Tensors { return {inputs[0] * 2}; };
  const at::Tensor kept = recompute(twice, {input}, {})[0].sum();
  torch::autograd::backward({kept}, {}, /*retain_graph=*/true);
  torch::autograd::backward({kept}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(input.grad(), at::ones({2}) * 4));
  const at::Tensor once = recompute(twice, {input}, {})[0];
  torch::autograd::backward({once}, {at::ones({2})});
  EXPECT_THROW(torch::autograd::backward({once}, {at::ones({2})}), ValueError);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Recompute, refuses_what_would_be_wrong) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  const at::Tensor hidden = input * 1.0;
  EXPECT_NE(
      error_of([&] {
        recompute(
            [](Tensors inputs) -> Tensors { return {at::relu_(inputs[0])}; },
            {hidden}, {});
      }).find("in place"),
      std::string::npos);
  const at::Tensor result =
      recompute([](Tensors inputs) -> Tensors { return {inputs[0] * 2}; },
                {input}, {})[0];
  EXPECT_NE(error_of([&] {
              torch::autograd::grad({result.sum()}, {input});
            }).find("some tensors only"),
            std::string::npos);
  const at::Tensor longer = recompute(
      [](Tensors inputs) -> Tensors {
        return {is_recomputing() ? at::cat({inputs[0], inputs[0]})
                                 : inputs[0] * 2};
      },
      {input}, {})[0];
  EXPECT_NE(error_of([&] {
              torch::autograd::backward({longer.sum()});
            }).find("must do the same both times"),
            std::string::npos);
}

TEST(Recompute, is_differentiated_once) {
  const at::Tensor input = at::randn({2}).requires_grad_();
  const at::Tensor result =
      recompute([](Tensors inputs) -> Tensors { return {inputs[0] * 2}; },
                {input}, {})[0];
  torch::autograd::backward({(result * result).sum()}, {}, true, true);
  EXPECT_TRUE(at::equal(input.grad().detach(), input.detach() * 8));
  EXPECT_NE(error_of([&] {
              torch::autograd::backward({input.grad().sum()});
            }).find("can be differentiated once only"),
            std::string::npos);
  input.mutable_grad().reset();  // see the next test
}

// The graph of a leaf's gradient leads back to the leaf: a circle of PyTorch
// with create_graph=True, which lasts until `.grad` is reset (see its
// torch.autograd.backward). A checkpoint is kept as long as an operator of
// PyTorch is, and no longer; its parameters are in no circle.
TEST(Recompute, a_gradient_with_a_graph_keeps_what_one_of_pytorch_keeps) {
  using WeakNode = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  const at::Tensor input = at::randn({2}).requires_grad_();
  const at::Tensor weight = at::randn({2}).requires_grad_();
  const auto multiply = [&](Tensors inputs) -> Tensors {
    return {inputs[0] * weight};
  };
  const auto differentiate = [&](bool is_recomputed, bool has_graph) {
    input.mutable_grad().reset();
    weight.mutable_grad().reset();
    const at::Tensor result =
        (is_recomputed ? recompute(multiply, {input}, {}) : multiply({input}))
            .at(0);
    torch::autograd::backward({(result * result).sum()}, {}, has_graph,
                              has_graph);
    return WeakNode(result.grad_fn());
  };
  EXPECT_TRUE(differentiate(true, false).expired());
  for (const bool is_recomputed : {false, true}) {
    const WeakNode node = differentiate(is_recomputed, true);
    EXPECT_FALSE(node.expired());
    EXPECT_TRUE(input.grad().requires_grad());
    EXPECT_EQ(weight.grad().requires_grad(), !is_recomputed);
    input.mutable_grad().reset();
    if (!is_recomputed) weight.mutable_grad().reset();
    EXPECT_TRUE(node.expired()) << is_recomputed;
  }
}

}  // namespace
}  // namespace smp::memory
