// The module server over the in-process world: threads are ranks.

#include "csrc/pipeline/server.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

// The numbers that one process computes: losses, and gradients by rank.
struct Plain {
  Plain(int size, int num_microbatches, int num_chunks = 1) {
    for (int r = 0; r < size; ++r) weights.push_back(make_weight(r));
    for (int mb = 0; mb < num_microbatches; ++mb) {
      at::Tensor x = make_input(mb);
      for (int i = 0; i < size * num_chunks; ++i) {
        x = compute(x, weights[i % size]);
      }
      const at::Tensor loss = x.sum();
      losses.push_back(loss.item<double>());
      torch::autograd::backward({loss}, {});
    }
  }
  std::vector<at::Tensor> weights;
  std::vector<double> losses;
};

class Chain : public ::testing::TestWithParam<
                  std::tuple<int, std::string, int, bool, bool>> {};

TEST_P(Chain, over_ranks_matches_one_process) {
  const auto [size, policy, num_microbatches, has_handles, has_memory] =
      GetParam();
  const Plain plain(size, num_microbatches);
  const RankSettings settings{.size = size,
                              .policy = policy,
                              .has_handles = has_handles,
                              .has_shared_memory = has_memory};
  run_servers(settings, [&](Rank& self) {
    for (int step = 1; step <= 3; ++step) {
      self.step_of_chains(num_microbatches);
      EXPECT_EQ(self.losses, plain.losses);
      const at::Tensor expected = plain.weights[self.rank].grad().mul(step);
      EXPECT_TRUE(at::allclose(self.w.grad(), expected, 1e-12, 1e-13));
      EXPECT_GT(self.w.grad().abs().max().item<double>(), 0);
      EXPECT_EQ(self.server->num_served_calls(),
                self.rank == 0 ? 0 : step * num_microbatches);
      self.expect_empty();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Chain,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values("interleaved",
                                                              "simple",
                                                              "zero_bubble"),
                                            ::testing::Values(1, 2, 8),
                                            ::testing::Bool(),
                                            ::testing::Bool()));

// Several stages on each rank: requests of a rank to itself.
TEST(VirtualStages, match_one_process) {
  for (const char* policy : {"virtual_interleaved", "interleaved"}) {
    const RankSettings settings{.size = 3, .policy = policy, .num_chunks = 2};
    const Plain plain(settings.size, 6, settings.num_chunks);
    run_servers(settings, [&](Rank& self) {
      for (int step = 1; step <= 3; ++step) {
        self.step_of_chains(6);
        EXPECT_EQ(self.losses, plain.losses);
        const at::Tensor expected = plain.weights[self.rank].grad().mul(step);
        EXPECT_TRUE(at::allclose(self.w.grad(), expected, 1e-12, 1e-13));
        EXPECT_EQ(self.server->num_served_calls(),
                  step * 6 * (self.rank == 0 ? 1 : 2));
        self.expect_empty();
      }
    });
  }
}

TEST(Server, evaluation_keeps_no_graph) {
  run_servers({.size = 3}, [](Rank& self) {
    self.step(2, [&](int mb) {
      const at::NoGradGuard no_grad;
      if (self.rank != 0) {
        const ModelOutput output = self.server->announcements().await_output();
        EXPECT_FALSE(output.tensors.at(0).requires_grad);
        return;
      }
      at::Tensor x = self.call_one(2, self.call_one(1, make_input(mb)));
      EXPECT_FALSE(x.requires_grad());
      const at::Tensor sum = self.arrive(x).sum();
      const at::Tensor expected =
          compute(compute(make_input(mb), make_weight(1)), make_weight(2));
      EXPECT_EQ(sum.item<double>(), expected.sum().item<double>());
      self.server->announcements().publish_output("sum", {sum});
    });
    self.expect_empty();
    EXPECT_FALSE(self.w.grad().defined());
  });
}

TEST(Server, ranks_that_run_different_step_functions_are_told) {
  run_servers({.size = 2}, [](Rank& self) {
    if (self.rank == 0) {
      self.server->steps().begin("train", 2);
      return;
    }
    try {
      self.server->steps().begin("evaluate", 2);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("'evaluate' here but 'train'"),
                std::string::npos)
          << e.what();
    }
  });
}

TEST(Server, results_that_get_no_gradient_leave_no_record) {
  run_servers({.size = 2}, [](Rank& self) {
    for (int step = 0; step < 2; ++step) {
      self.step(3, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        self.call_one(1, make_input(mb));  // its result is not used
        self.train_on(mb, compute(make_input(mb), self.w).sum());
      });
      self.expect_empty();
    }
    EXPECT_EQ(self.server->num_served_calls(), self.rank * 6);
    EXPECT_EQ(self.w.grad().defined(), self.rank == 0);
  });
}

TEST(Server, a_call_outside_of_a_step_says_so) {
  run_servers({.size = 2}, [](Rank& self) {
    if (self.rank != 0) return;
    try {
      self.call_one(1, make_input(0));
      FAIL() << "no error";
    } catch (const Error& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find("'stage1'"), std::string::npos) << text;
      EXPECT_NE(text.find("@smp.step"), std::string::npos) << text;
    }
  });
}

TEST(Server, a_second_backward_through_a_remote_call_is_refused) {
  run_servers({.size = 2}, [](Rank& self) {
    const auto body = [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      const at::Tensor loss =
          self.arrive(self.call_one(1, make_input(mb))).sum();
      torch::autograd::backward({loss}, {}, /*keep_graph=*/true);
      self.train_on(mb, loss);
    };
    EXPECT_THROW(self.step(1, body), Error);
    if (self.rank == 1) {
      ASSERT_EQ(self.errors.size(), 1u);
      EXPECT_NE(self.errors[0].find("its backward ran already"),
                std::string::npos)
          << self.errors[0];
    }
    self.expect_empty();
  });
}

TEST(Server, several_results_some_without_gradient) {
  run_servers({.size = 2}, [](Rank& self) {
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      const at::Tensor y = compute(inputs[0], self.w);
      // The mask, and the number of rows, get no gradient.
      return std::vector{y, y.detach(), y.sum(0)};
    };
    for (int step = 0; step < 3; ++step) {
      self.w.mutable_grad().reset();
      self.step(2, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        const auto results = self.call(1, {make_input(mb)}).tensors;
        EXPECT_TRUE(results.at(0).requires_grad());
        EXPECT_FALSE(results.at(1).requires_grad());
        const at::Tensor a = self.arrive(results[0]);
        const at::Tensor b = self.arrive(results[1]);
        // In step 1 only the last one gets a gradient.
        self.train_on(
            mb, (step == 1 ? self.arrive(results[2]).sum() : a.mul(b).sum()));
      });
      self.expect_empty();
      if (self.rank == 0) continue;
      const at::Tensor w = make_weight(1);
      for (int mb = 0; mb < 2; ++mb) {
        const at::Tensor y = compute(make_input(mb), w);
        torch::autograd::backward(
            {step == 1 ? y.sum() : y.mul(y.detach()).sum()}, {});
      }
      EXPECT_TRUE(at::allclose(self.w.grad(), w.grad(), 1e-12, 1e-13));
    }
  });
}

}  // namespace
}  // namespace smp::pipeline
