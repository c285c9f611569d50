// Tests where data go, what is not sent, and which ranks do not wait.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "csrc/common/check.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfTransfers = 3;

int64_t bytes_to(const Rank& self, int dst) {
  const auto stats = self.server->stats();
  const auto found = stats.data_bytes.find(dst);
  return found == stats.data_bytes.end() ? 0 : found->second;
}

// The driver has no part in the chain but its input and its loss.
void chain_elsewhere(Rank& self, int mb) {
  if (self.rank != 0) return self.follow(mb);
  at::Tensor x = make_input(mb);
  for (int r = 1; r < self.size(); ++r) x = self.call_one(r, x);
  self.train_on(mb, self.arrive(x).sum());
}

TEST(Transfers, go_from_owner_to_owner) {
  run_servers({.size = 4}, [](Rank& self) {
    for (int64_t step = 1; step <= 3; ++step) {
      self.step(kMicrobatchesOfTransfers,
                [&](int mb) { chain_elsewhere(self, mb); });
      const int64_t once = step * kMicrobatchesOfTransfers * kTensorBytes;
      const int64_t losses =
          step * kMicrobatchesOfTransfers * 8;  // to each of them
      if (self.rank == 0) {
        EXPECT_EQ(bytes_to(self, 1), once + losses) << "inputs";
        EXPECT_EQ(bytes_to(self, 2), losses);
        EXPECT_EQ(bytes_to(self, 3), once + losses) << "gradients of the loss";
      } else {
        EXPECT_EQ(bytes_to(self, 0), self.rank == 3 ? once : 0) << self.rank;
        for (int other = 1; other < 4; ++other) {
          const bool is_neighbour = std::abs(other - self.rank) == 1;
          EXPECT_EQ(bytes_to(self, other), is_neighbour ? once : 0)
              << self.rank << " to " << other;
        }
      }
    }
  });
}

TEST(Transfers, without_handles_all_go_through_the_caller) {
  run_servers({.size = 3, .has_handles = false}, [](Rank& self) {
    self.step(kMicrobatchesOfTransfers,
              [&](int mb) { chain_elsewhere(self, mb); });
    if (self.rank == 1) {
      EXPECT_EQ(bytes_to(self, 2), 0);
      EXPECT_GT(bytes_to(self, 0), 0);
    }
  });
}

TEST(Transfers, of_a_recorded_step_need_no_orders_and_fewer_messages) {
  run_servers({.size = 3}, [](Rank& self) {
    std::vector<Server::Stats> after(1);
    for (int step = 0; step < 3; ++step) {
      self.step(kMicrobatchesOfTransfers,
                [&](int mb) { chain_elsewhere(self, mb); });
      after.push_back(self.server->stats());
    }
    const auto headers = [&](int step) {
      return after[step + 1].headers - after[step].headers;
    };
    const auto pushes = [&](int step) {
      return after[step + 1].pushes - after[step].pushes;
    };
    EXPECT_EQ(pushes(1), 0);
    EXPECT_EQ(pushes(2), 0);
    if (self.rank != 0) {
      // The rank sends data, ends of bodies, and acknowledgements; in the first
      // step also answers.
      const int64_t data = (self.rank == 2 ? 2 : 1) * kMicrobatchesOfTransfers;
      for (const int step : {1, 2}) {
        EXPECT_LE(headers(step), data + kMicrobatchesOfTransfers +
                                     2 * kMicrobatchesOfTransfers);
      }
      EXPECT_GE(headers(0),
                data + kMicrobatchesOfTransfers + kMicrobatchesOfTransfers + 2);
      return;
    }
    EXPECT_GE(pushes(0), 1 + 1 + 1) << "two hops and the result";
    EXPECT_GE(after[1].fetches, 1);
    EXPECT_EQ(after[3].fetches, after[1].fetches) << "they come by themselves";
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(after[step + 1].requests - after[step].requests,
                4 * kMicrobatchesOfTransfers);
    }
    // Requests; loss and ends of backward and microbatch; begin and end.
    EXPECT_EQ(headers(1), headers(2));
    EXPECT_LT(headers(1), headers(0));
    EXPECT_EQ(headers(1), kMicrobatchesOfTransfers * (4 + 3 * 2) + 2 * 2);
  });
}

TEST(Transfers, a_caller_that_knows_what_comes_does_not_wait_for_it) {
  std::promise<void> is_far;
  const auto far = is_far.get_future().share();
  int step = 0;
  run_servers({.size = 3}, [&](Rank& self) {
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      if (self.server->num_served_calls() == 2) {
        EXPECT_EQ(far.wait_for(std::chrono::seconds(120)),
                  std::future_status::ready)
            << "the caller waits";
      }
      return std::vector{compute(inputs[0], self.w)};
    };
    for (int round = 0; round < 2; ++round) {
      self.step(1, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        const at::Tensor x = self.call_one(2, self.call_one(1, make_input(mb)));
        if (++step == 2) is_far.set_value();
        self.train_on(mb, self.arrive(x).sum());
      });
    }
  });
}

TEST(Transfers, a_hop_that_is_not_used_any_more_is_unlearned) {
  run_servers({.size = 3}, [](Rank& self) {
    int64_t sent = 0;
    for (int step = 0; step < 5; ++step) {
      self.step(1, [&](int mb) {
        const at::NoGradGuard no_grad;
        if (self.rank != 0) {
          self.server->announcements().await_output();
          return;
        }
        const at::Tensor x = self.call_one(1, make_input(mb));
        // Both calls are of a known kind all the time.
        const at::Tensor y =
            self.call_one(2, step < 2 ? x : make_input(mb + 1));
        self.server->announcements().publish_output("sum",
                                                    {self.arrive(y).sum()});
      });
      self.expect_empty();
      if (self.rank != 1) continue;
      const int64_t now = bytes_to(self, 2);
      // Step 2 still sends it, for nothing.
      EXPECT_EQ(now - sent, step <= 2 ? kTensorBytes : 0) << "step " << step;
      sent = now;
    }
  });
}

TEST(Transfers, an_argument_travels_once_per_rank_and_version) {
  run_servers({.size = 2}, [](Rank& self) {
    self.modules[1] = [](std::vector<at::Tensor> inputs) {
      return std::vector{inputs[0].sum()};
    };
    self.step(1, [&](int) {
      const at::NoGradGuard no_grad;
      if (self.rank != 0) return;
      at::Tensor mask = at::ones({kRows, kWidth}, at::kDouble);
      const auto sum = [&] {
        return self.arrive(self.call_one(1, mask)).item<double>();
      };
      EXPECT_EQ(sum(), kRows * kWidth);
      EXPECT_EQ(sum(), kRows * kWidth);
      EXPECT_EQ(bytes_to(self, 1), kTensorBytes);
      mask.add_(1);
      EXPECT_EQ(sum(), 2 * kRows * kWidth);
      EXPECT_EQ(bytes_to(self, 1), 2 * kTensorBytes);
    });
    self.expect_empty();
  });
}

TEST(Transfers, arithmetic_on_handles_happens_at_their_home) {
  run_servers({.size = 3}, [](Rank& self) {
    for (int step = 0; step < 2; ++step) {
      const int64_t before = bytes_to(self, 0);
      self.step(2, [&](int mb) {
        const at::NoGradGuard no_grad;
        if (self.rank != 0) return;
        const at::Tensor a = self.call_one(1, make_input(mb));
        const at::Tensor b = self.call_one(2, a);
        const RemoteRefPtr sum = self.server->caller().call_operation(
            Operation::named("add", false, 0.5),
            {remote_ref_of(b), remote_ref_of(a)});
        EXPECT_EQ(sum->home_rank, 2) << "the youngest has just been made there";
        const RemoteRefPtr half = self.server->caller().call_operation(
            Operation::named("div", true, 2), {sum});
        const at::Tensor expected_a = compute(make_input(mb), make_weight(1));
        const at::Tensor expected_b = compute(expected_a, make_weight(2));
        EXPECT_TRUE(at::equal(self.server->tensors().fetch(half),
                              at::add(expected_b, expected_a, 0.5).div(2)));
      });
      self.expect_empty();
      EXPECT_EQ(bytes_to(self, 0) - before,
                self.rank == 2 ? 2 * kTensorBytes : 0);
    }
  });
}

TEST(Transfers, a_module_may_call_a_module_of_a_third_rank) {
  run_servers({.size = 3}, [](Rank& self) {
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      const at::Tensor inner = self.call_one(2, self.leave(inputs[0]));
      return std::vector{compute(self.arrive(inner), self.w)};
    };
    for (int step = 1; step <= 3; ++step) {
      self.step(kMicrobatchesOfTransfers, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        const at::Tensor x = self.leave(compute(make_input(mb), self.w));
        self.train_on(mb, self.arrive(self.call_one(1, x)).sum());
      });
      self.expect_empty();
      std::vector<at::Tensor> weights;
      for (int r = 0; r < 3; ++r) weights.push_back(make_weight(r));
      for (int mb = 0; mb < kMicrobatchesOfTransfers; ++mb) {
        at::Tensor x = make_input(mb);
        for (const int r : {0, 2, 1}) x = compute(x, weights[r]);
        torch::autograd::backward({x.sum()}, {});
        EXPECT_EQ(self.losses[mb], x.sum().item<double>());
      }
      EXPECT_TRUE(at::allclose(
          self.w.grad(), weights[self.rank].grad().mul(step), 1e-12, 1e-13));
    }
  });
}

TEST(Transfers, an_argument_changed_in_place_comes_back_as_a_result) {
  run_servers({.size = 2}, [](Rank& self) {
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      inputs[1].mul_(2);
      return std::vector{compute(inputs[0].add(inputs[1]), self.w)};
    };
    for (int step = 1; step <= 2; ++step) {
      self.step(2, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        const at::Tensor x = self.leave(compute(make_input(mb), self.w));
        const auto result = self.call(1, {make_input(mb), x});
        EXPECT_EQ(result.changed_args, std::vector<int>{1});
        ASSERT_EQ(result.tensors.size(), 2u);
        EXPECT_FALSE(result.shares_memory);
        const at::Tensor y = self.arrive(result.tensors[0]);
        const at::Tensor changed = self.arrive(result.tensors[1]);
        EXPECT_TRUE(
            at::equal(changed, compute(make_input(mb), make_weight(0)).mul(2)));
        self.train_on(mb, y.sum().add(changed.mul(changed).sum()));
      });
      self.expect_empty();
      std::vector<at::Tensor> weights = {make_weight(0), make_weight(1)};
      for (int mb = 0; mb < 2; ++mb) {
        const at::Tensor changed = compute(make_input(mb), weights[0]).mul(2);
        const at::Tensor y = compute(make_input(mb).add(changed), weights[1]);
        const at::Tensor loss = y.sum().add(changed.mul(changed).sum());
        torch::autograd::backward({loss}, {});
      }
      EXPECT_TRUE(at::allclose(
          self.w.grad(), weights[self.rank].grad().mul(step), 1e-12, 1e-13));
    }
  });
}

TEST(Transfers, results_that_are_views_of_arguments_do_not_travel) {
  run_servers({.size = 2}, [](Rank& self) {
    self.modules[1] = [](std::vector<at::Tensor> inputs) {
      return std::vector{inputs[0].narrow(0, 1, 2).t(), inputs[0].sum()};
    };
    self.step(1, [&](int mb) {
      const at::NoGradGuard no_grad;
      if (self.rank != 0) return;
      const at::Tensor x = make_input(mb);
      const auto result = self.call(1, {x});
      EXPECT_FALSE(result.tensors.at(0).defined());
      ASSERT_EQ(result.views.size(), 1u);
      const ViewOfArgument& view = result.views[0];
      EXPECT_EQ(view.result_idx, 0);
      EXPECT_EQ(view.argument_idx, 0);
      EXPECT_TRUE(at::equal(x.as_strided(view.sizes, view.strides, view.offset),
                            x.narrow(0, 1, 2).t()));
      EXPECT_EQ(self.arrive(result.tensors.at(1)).item<double>(),
                x.sum().item<double>());
    });
    EXPECT_EQ(bytes_to(self, 0), self.rank == 1 ? 8 : 0);
  });
}

TEST(Transfers, results_that_share_memory_with_each_other_are_announced) {
  run_servers({.size = 2}, [](Rank& self) {
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      const at::Tensor y = compute(inputs[0], self.w);
      return std::vector{y, y.t()};
    };
    self.step(1, [&](int mb) {
      const at::NoGradGuard no_grad;
      if (self.rank != 0) return;
      const auto result = self.call(1, {make_input(mb)});
      EXPECT_TRUE(result.shares_memory);
      EXPECT_TRUE(result.views.empty());
      EXPECT_TRUE(at::equal(self.arrive(result.tensors[0]).t(),
                            self.arrive(result.tensors[1])));
    });
  });
}

// Rank 1 looks at all outputs, rank 2 at none.
TEST(Transfers, large_outputs_go_to_those_who_use_them) {
  constexpr int64_t kLarge = 20'000;
  constexpr int64_t kLargeBytes = kLarge * 8;
  run_servers({.size = 4}, [&](Rank& self) {
    self.modules[3] = [&](std::vector<at::Tensor>) {
      return std::vector{at::ones({kLarge}, at::kDouble).mul(3)};
    };
    for (int64_t step = 1; step <= 2; ++step) {
      self.step(2, [&](int mb) {
        const at::NoGradGuard no_grad;
        if (self.rank == 0) {
          const at::Tensor away = self.call_one(3, make_input(mb));
          const at::Tensor own = at::ones({kLarge}, at::kDouble).mul(2);
          self.server->announcements().publish_output(
              "outputs", {away, own, at::ones({3})});
          return;
        }
        const ModelOutput output = self.server->announcements().await_output();
        ASSERT_EQ(output.tensors.size(), 3u);
        EXPECT_TRUE(at::equal(output.tensors[2].data, at::ones({3})));
        ASSERT_TRUE(output.tensors[0].ref && output.tensors[1].ref);
        if (self.rank == 2) return;
        const at::Tensor ones = at::ones({kLarge}, at::kDouble);
        EXPECT_TRUE(at::equal(
            self.server->tensors().fetch(output.tensors[0].ref), ones.mul(3)));
        if (self.rank == 1) {
          EXPECT_TRUE(
              at::equal(self.server->tensors().fetch(output.tensors[1].ref),
                        ones.mul(2)));
        }
      });
      self.expect_empty();
      EXPECT_LT(bytes_to(self, 2), kLargeBytes);
      if (self.rank == 3) {
        EXPECT_EQ(bytes_to(self, 1), 2 * step * kLargeBytes);
        EXPECT_EQ(bytes_to(self, 0), 0) << "the driver does not look at it";
      } else if (self.rank == 0) {
        EXPECT_LT(bytes_to(self, 1) - 2 * step * kLargeBytes, kLargeBytes / 2);
      }
    }
  });
}

TEST(Transfers, a_result_that_outlives_its_microbatch_is_settled) {
  run_servers({.size = 2}, [](Rank& self) {
    std::vector<at::Tensor> handles(2);
    self.step(2, [&](int mb) {
      const at::NoGradGuard no_grad;
      if (self.rank == 0) handles[mb] = self.call_one(1, make_input(mb));
    });
    self.expect_empty();
    const auto expected = [](int mb) {
      return compute(make_input(mb), make_weight(1));
    };
    if (self.rank == 0) {
      for (int mb = 0; mb < 2; ++mb) {
        const RemoteRefPtr ref = remote_ref_of(handles[mb]);
        EXPECT_TRUE(at::equal(ref->kept, expected(mb)));
        at::Tensor own =
            self.server->tensors().fetch_to_own(ref);  // outside of a step
        own.zero_();
        EXPECT_TRUE(at::equal(ref->kept, expected(mb)));
      }
    }
    self.step(1, [&](int) {  // microbatch 1 becomes an argument of another one
      const at::NoGradGuard no_grad;
      if (self.rank != 0) return;
      const at::Tensor y = self.arrive(self.call_one(1, handles[1]));
      EXPECT_TRUE(at::equal(y, compute(expected(1), make_weight(1))));
    });
    self.expect_empty();
  });
}

TEST(Transfers, a_result_of_another_microbatch_is_refused_as_an_argument) {
  std::atomic<int> num_followed{0};
  run_servers({.size = 2, .active_microbatches = 2}, [&](Rank& self) {
    // So that code that asks for its result has to wait.
    self.modules[1] = [&](std::vector<at::Tensor> inputs) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return std::vector<at::Tensor>{compute(inputs[0], self.w)};
    };
    at::Tensor first;
    const auto body = [&](int mb) {
      const at::NoGradGuard no_grad;
      if (self.rank != 0) {
        ++num_followed;
        self.server->announcements().await_output();
        return;
      }
      if (mb == 0) {
        first = self.call_one(1, make_input(0));
        self.arrive(self.call_one(1, make_input(1)));  // the other body runs
        self.server->announcements().publish_output("", {});
      } else {
        // Not while the other rank is still in the step before.
        while (num_followed < 2) std::this_thread::yield();
        self.call_one(1, first);
      }
    };
    self.step(1, body);  // from now on the first call does not wait
    EXPECT_THROW(self.step(2, body), Error);
    first.reset();
    if (self.rank == 0) {
      ASSERT_FALSE(self.errors.empty());
      EXPECT_NE(self.errors[0].find("a result of microbatch 0 on another rank "
                                    "is an argument in microbatch 1"),
                std::string::npos)
          << self.errors[0];
    }
    self.expect_empty();
  });
}

}  // namespace
}  // namespace smp::pipeline
