// Microbatches that take another way than the ones before: a caller that runs
// ahead computes the same numbers as a caller that fetches each result.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "csrc/common/check.h"
#include "tests/cpp/mailbox/test_delays.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfDeviations = 4;
constexpr int kSteps = 5;

// Computes the driver's loss in one microbatch of one step.
using Loss = std::function<at::Tensor(Rank& self, int step, int mb)>;

struct Outcome {
  std::vector<std::vector<double>> losses;  // by step
  std::vector<at::Tensor> grads;            // by rank
  std::vector<Server::Stats> stats;         // of the driver, after each step
};

Outcome run(RankSettings settings, bool has_handles, const Loss& loss,
            int num_steps = kSteps) {
  settings.has_handles = has_handles;
  Outcome outcome;
  outcome.grads.resize(settings.size);
  run_servers(settings, [&](Rank& self) {
    for (int i = self.rank; i < settings.num_modules(); i += self.size()) {
      self.modules[i] = [&](std::vector<at::Tensor> inputs) {
        const at::Tensor y = compute(inputs.at(0), self.w);
        return std::vector{inputs.size() > 1 ? y.mul(inputs[1]) : y};
      };
    }
    for (int step = 0; step < num_steps; ++step) {
      self.step(kMicrobatchesOfDeviations, [&](int mb) {
        if (self.rank != 0) return self.follow(mb);
        self.train_on(mb, loss(self, step, mb));
      });
      self.expect_empty();
      if (self.rank != 0) continue;
      outcome.losses.push_back(self.losses);
      outcome.stats.push_back(self.server->stats());
    }
    outcome.grads[self.rank] = self.w.grad();
  });
  return outcome;
}

void expect_equal(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  for (size_t rank = 0; rank < a.grads.size(); ++rank) {
    ASSERT_TRUE(a.grads[rank].defined() && b.grads[rank].defined()) << rank;
    // The order of microbatches is free, and here that is the order of sums.
    EXPECT_TRUE(at::allclose(a.grads[rank], b.grads[rank], 1e-12, 1e-13))
        << "rank " << rank;
  }
}

// Runs with and without handles; the numbers are the same.
void run_both(const RankSettings& settings, const Loss& loss,
              int num_steps = kSteps) {
  const Outcome fetching = run(settings, false, loss, num_steps);
  const Outcome outcome = run(settings, true, loss, num_steps);
  expect_equal(fetching, outcome);
  EXPECT_EQ(outcome.stats.back().requests, fetching.stats.back().requests);
}

at::Tensor input(Rank& self, int mb) {
  return self.leave(compute(make_input(mb), self.w));
}

// Twice each rank, one after the other.
at::Tensor chain_of(Rank& self, at::Tensor x) {
  for (int r = 1; r < self.size(); ++r) {
    x = self.call_one(r, self.call_one(r, x));
  }
  return x;
}

TEST(Deviations, goes_on_after_steps_that_took_another_way) {
  // Steps 0, 2, 4 ... and 1, 3, 5 ... are two programs with one beginning.
  run_both(
      {.size = 3},
      [](Rank& self, int step, int mb) {
        at::Tensor x = self.call_one(1, input(self, mb));
        x = self.call_one(step % 2 == 0 ? 1 : 2, x);
        return self.arrive(self.call_one(2, x)).sum();
      },
      6);
}

TEST(Deviations, a_call_that_is_left_out_is_a_deviation_in_the_middle) {
  run_both({.size = 3}, [](Rank& self, int step, int mb) {
    at::Tensor x = self.call_one(1, self.call_one(1, input(self, mb)));
    if (step < kSteps - 1 || mb != 2) x = self.call_one(1, x);
    return self.arrive(self.call_one(2, x)).sum();
  });
}

TEST(Deviations, microbatches_may_change_places) {
  run_both({.size = 2}, [](Rank& self, int step, int mb) {
    at::Tensor x = self.call_one(1, input(self, mb));
    if ((mb + step) % 2 == 0) x = self.call_one(1, x);
    return self.arrive(x).sum();
  });
}

TEST(Deviations, shapes_may_change) {
  run_both({.size = 3}, [](Rank& self, int step, int mb) {
    // Two shapes that were seen before, and a new one at the end.
    const int64_t rows = step == kSteps - 1 && mb == 1 ? 7 : 8 + mb % 2 * 8;
    const at::Tensor x = compute(make_input(mb), self.w).narrow(0, 0, rows);
    return self.arrive(chain_of(self, self.leave(x))).sum();
  });
}

TEST(Deviations, modes_may_change) {
  run_both({.size = 2}, [](Rank& self, int step, int mb) {
    const at::Tensor x = input(self, mb);
    const bool training = step != 3;
    const RemoteResult y =
        remote_call(self.server->caller(), 1, 1, training, "call", "mode", {x});
    if (step == 4 && mb == 0) {
      const at::NoGradGuard no_grad;
      self.arrive(self.call_one(1, make_input(mb)));
    }
    return self.arrive(y.tensors[0]).sum();
  });
}

TEST(Deviations, arguments_that_always_change_are_sent_each_time) {
  run_both(
      {.size = 2},
      [](Rank& self, int step, int mb) {
        const auto number =
            std::to_string(step * kMicrobatchesOfDeviations + mb);
        const auto x = self.call(1, {input(self, mb)}, number);
        return self.arrive(x.tensors[0]).sum();
      },
      40);
}

TEST(Deviations, small_arguments_come_with_their_own_data) {
  run_both({.size = 2}, [](Rank& self, int step, int mb) {
    at::Tensor x = input(self, mb);
    for (int i = 0; i < 3; ++i) {
      at::Tensor factor = make_input(step + 3 * mb + i).narrow(0, 0, 1).add(1);
      const auto y = self.call(1, {x, factor});
      factor.fill_(1e9);  // the call is over for its caller
      x = y.tensors[0];
    }
    return self.arrive(x).sum();
  });
}

TEST(Deviations, works_with_stages_of_the_drivers_own) {
  run_both({.size = 2, .num_chunks = 2}, [](Rank& self, int, int mb) {
    at::Tensor x = input(self, mb);
    for (int i = 1; i < 4; ++i) x = self.call_one(i, x);
    return self.arrive(x).sum();
  });
}

TEST(Deviations, gives_the_same_numbers_with_random_delays) {
  mailbox::TestDelays::set(11, 500);
  for (const bool has_shared_memory : {false, true}) {
    run_both({.size = 3, .has_shared_memory = has_shared_memory},
             [](Rank& self, int step, int mb) {
               const at::Tensor x = chain_of(self, input(self, mb));
               return self.arrive(mb == step ? self.call_one(1, x) : x).sum();
             });
  }
  mailbox::TestDelays::set(0, 0);
}

TEST(Deviations, an_exception_in_a_module_is_told_as_always) {
  run_servers({.size = 3}, [](Rank& self) {
    int num_calls = 0;
    self.modules[2] = [&](std::vector<at::Tensor> inputs) {
      if (++num_calls == 3 * kMicrobatchesOfDeviations)
        throw std::runtime_error("broken");
      return std::vector{compute(inputs[0], self.w)};
    };
    const auto body = [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      const at::Tensor x = self.call_one(1, input(self, mb));
      self.train_on(mb, self.arrive(self.call_one(2, x)).sum());
    };
    self.step(kMicrobatchesOfDeviations, body);
    self.step(kMicrobatchesOfDeviations, body);
    if (self.rank == 2) {
      EXPECT_THROW(self.step(kMicrobatchesOfDeviations, body),
                   std::runtime_error);
      ASSERT_FALSE(self.errors.empty());
      EXPECT_NE(self.errors[0].find("stage2"), std::string::npos);
    } else {
      EXPECT_THROW(self.step(kMicrobatchesOfDeviations, body), PeerFailure);
    }
    self.expect_empty();
  });
}

}  // namespace
}  // namespace smp::pipeline
