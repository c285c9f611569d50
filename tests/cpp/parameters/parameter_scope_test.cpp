#include "csrc/parameters/parameter_scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/cpp/parameters/parameter_store_fixture.h"

namespace smp::parameters {
namespace {

// Layers y = sin(x @ W_i), each its own unit.
struct Layers : Sharded {
  explicit Layers(const comm::CommunicatorPtr& group, int num_layers = 3)
      : Sharded(Shapes(num_layers, {4, 4}), units_of(num_layers),
                make_flat_gathers(comm::as_wanted(group))) {
    // When two threads call a vector function of MKL for the first time at
    // once, one of them may get a less exact version (here by 1e-12).
    static const at::Tensor first_call = at::ones({2, 4}, at::kDouble).sin();
    for (int i = 0; i < num_layers; ++i) {
      // Small numbers: sin is to be of use.
      values[i].mul_(1e-4);
      shards[i].mul_(1e-4);
    }
  }

  static Units units_of(int num_layers) {
    Units units;
    for (int i = 0; i < num_layers; ++i) units.push_back({i});
    return units;
  }

  at::Tensor layer(int i, const at::Tensor& x) {
    ParameterScope scope(uses, {i});
    at::Tensor y = x.matmul(params[i]).sin();
    scope.leave({y});
    return y;
  }

  std::vector<bool> whole() const {
    std::vector<bool> result;
    for (size_t i = 0; i < params.size(); ++i) {
      result.push_back(has_memory(static_cast<int>(i)));
    }
    return result;
  }

  // Gradients that an unsharded model gets.
  std::vector<at::Tensor> expected(const std::vector<int>& order,
                                   const at::Tensor& x) const {
    std::vector<at::Tensor> plain;
    for (const at::Tensor& value : values) {
      plain.push_back(value.clone().requires_grad_());
    }
    at::Tensor y = x.detach();
    for (const int i : order) y = y.matmul(plain[i]).sin();
    torch::autograd::backward({y.sum()});
    std::vector<at::Tensor> grads;
    grads.reserve(plain.size());
    for (const at::Tensor& param : plain) grads.push_back(param.grad());
    return grads;
  }

  void expect_grads(const std::vector<at::Tensor>& grads) const {
    for (size_t i = 0; i < params.size(); ++i) {
      ASSERT_TRUE(params[i].grad().defined());
      EXPECT_TRUE(params[i].grad().equal(grads[i]));
      EXPECT_NE(grads[i].abs().max().item<double>(), 0);
    }
  }
};

at::Tensor probe(const at::Tensor& x, const std::function<void()>& look) {
  const at::Tensor y = x.mul(1);
  y.register_hook([look](const at::Tensor&) { look(); });
  return y;
}

TEST(ParameterScope, backward_holds_one_layer_after_the_other) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    std::vector<std::vector<bool>> seen;
    const auto look = [&] { seen.push_back(layers.whole()); };
    at::Tensor y = x;
    for (int i = 0; i < 3; ++i) {
      y = layers.layer(i, y);
      EXPECT_EQ(layers.whole(), (std::vector<bool>{false, false, false}));
      if (i < 2) y = probe(y, look);
    }
    torch::autograd::backward({y.sum()});
    // Above a layer: the one above is still held, nothing else.
    EXPECT_EQ(seen, (std::vector<std::vector<bool>>{{false, false, true},
                                                    {false, true, false}}));
    EXPECT_EQ(layers.whole(), (std::vector<bool>{false, false, false}));
    EXPECT_EQ(layers.store->stats().live_elements, 0);
    EXPECT_EQ(layers.store->stats().peak_live_elements, 16);
    layers.expect_grads(layers.expected({0, 1, 2}, x));
  });
}

TEST(ParameterScope, a_view_that_is_changed_in_place_holds_its_layer) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 2);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    const auto changed = [&](int i, const at::Tensor& input) {
      ParameterScope scope(layers.uses, {i});
      at::Tensor y = input.matmul(layers.params[i]).view({1, 2, 4});
      scope.leave({y});
      y.sin_();
      return y.view({2, 4});
    };
    torch::autograd::backward({changed(1, changed(0, x)).sum()});
    EXPECT_EQ(layers.whole(), (std::vector<bool>{false, false}));
    layers.expect_grads(layers.expected({0, 1}, x));
  });
}

TEST(ParameterScope, a_layer_may_be_called_several_times) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 2);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    const std::vector<int> order = {0, 1, 0, 0, 1};
    for (int round = 0; round < 3; ++round) {  // the second gathers ahead
      for (const at::Tensor& param : layers.params) {
        param.mutable_grad().reset();
      }
      at::Tensor y = x;
      {
        ParameterScope root(layers.uses, {});
        for (const int i : order) y = layers.layer(i, y);
        root.leave({y});
      }
      torch::autograd::backward({y.sum()});
      layers.expect_grads(layers.expected(order, x));
      EXPECT_EQ(layers.store->stats().live_elements, 0);
    }
    EXPECT_EQ(layers.store->stats().num_deviations, 0);
    EXPECT_GT(layers.store->stats().num_hits, 0);
  });
}

TEST(ParameterScope, independent_calls_keep_what_the_other_one_needs) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 1);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    const at::Tensor a = layers.layer(0, x);
    const at::Tensor b = layers.layer(0, x.mul(2));
    torch::autograd::backward({a.sum().add(b.sum())});
    EXPECT_TRUE(layers.params[0].grad().allclose(
        layers.expected({0}, x)[0].add(layers.expected({0}, x.mul(2))[0])));
  });
}

TEST(ParameterScope, what_is_read_inside_is_held_until_the_scope_is_left) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 2);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    ParameterScope::read(*layers.uses, 1);
    EXPECT_FALSE(layers.has_memory(1)) << "nothing would let go of it";
    at::Tensor y;
    {
      ParameterScope outer(layers.uses, {});
      y = layers.layer(0, x);
      ParameterScope::read(*layers.uses, 1);
      EXPECT_TRUE(layers.is_whole(1));
      y = y.matmul(layers.params[1]).sin();
      outer.leave({y});
    }
    EXPECT_FALSE(layers.has_memory(1));
    torch::autograd::backward({y.sum()});
    layers.expect_grads(layers.expected({0, 1}, x));
    EXPECT_EQ(layers.store->stats().live_elements, 0);
  });
}

TEST(ParameterScope, a_result_that_is_a_parameter_stays_valid_around) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 2);
    const at::NoGradGuard no_grad;
    ParameterScope outer(layers.uses, {});
    {
      ParameterScope inner(layers.uses, {0, 1});
      inner.leave({layers.params[1].t()});
    }
    EXPECT_FALSE(layers.has_memory(0));
    EXPECT_TRUE(layers.is_whole(1));
    outer.leave({});
    EXPECT_FALSE(layers.has_memory(1));
  });
}

TEST(ParameterScope, a_failed_forward_lets_go) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 1);
    EXPECT_THROW(layers.layer(0, at::ones({3, 3})), std::exception);
    EXPECT_FALSE(layers.has_memory(0));
    EXPECT_EQ(layers.store->stats().live_elements, 0);
  });
}

// Gathers nothing, and fails as a device does where it is told to.
class FailingGathers final : public GatherGroup {
 public:
  int group_rank() const override { return 0; }
  int size() const override { return 1; }
  GatherPtr all_gather(at::Tensor output, at::Tensor input, uint64_t) override {
    TORCH_CHECK(!fails, "the device is lost");
    output.copy_(input);
    return std::make_unique<Over>();
  }
  GatherPtr compare(uint64_t) override { return nullptr; }
  GatherPtr meet(uint64_t) override { return std::make_unique<Over>(); }

  bool fails = false;

 private:
  struct Over final : Gather {
    void follow(const comm::WaitOptions&, const std::string&) override {}
  };
};

// A forward that fails leaves its scope by an exception, behind which the next
// unit is gathered ahead: a second exception would end the process.
TEST(ParameterScope, a_device_that_fails_behind_a_forward_is_no_end) {
  const auto group = std::make_shared<FailingGathers>();
  ParameterStore::Options options = Sharded::patient();
  options.max_live_elements = 16;  // one unit
  Sharded layers({{4, 4}, {4, 4}}, {{0}, {1}}, group, options);
  layers.store->begin_pass(1);
  for (const int i : {0, 1}) const ParameterScope scope(layers.uses, {i});
  layers.store->end_pass();
  layers.store->begin_pass(1);
  testing::internal::CaptureStderr();
  {
    const ParameterScope scope(layers.uses, {0});
    group->fails = true;
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find(
                "the release of parameters failed: the device is lost"),
            std::string::npos);
  EXPECT_THROW(ParameterScope(layers.uses, {1}), Error) << "who needs it";
}

TEST(ParameterScope, a_failed_backward_lets_go) {
  comm::run_ranks(2, [](int /*rank*/, const comm::CommunicatorPtr& group) {
    Layers layers(group, 2);
    const at::Tensor x = at::ones({2, 4}, layers.params[0].options());
    const at::Tensor y =
        probe(layers.layer(0, x), [] { throw std::runtime_error("meant to"); });
    EXPECT_THROW(torch::autograd::backward({layers.layer(1, y).sum()}),
                 std::exception);
    EXPECT_FALSE(layers.has_memory(1));
    EXPECT_EQ(layers.store->stats().live_elements, 0);
  });
}

}  // namespace
}  // namespace smp::parameters
