// static_mode: fewer messages, the same numbers, and deviations in the middle.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "csrc/comm/test_delays.h"
#include "csrc/common/check.h"
#include "tests/cpp/pipeline/server_ranks.h"

namespace smp::pipeline {
namespace {

constexpr int kMicrobatchesOfReplay = 4;
constexpr int kSteps = 5;

// What the driver computes in one microbatch of one step.
using Loss = std::function<at::Tensor(Rank& self, int step, int mb)>;

struct Outcome {
  std::vector<std::vector<double>> losses;  // by step
  std::vector<at::Tensor> grads;            // by rank
  std::vector<Server::Stats> stats;         // of the driver, after each step

  // Of the last step but `back`.
  int64_t in_step(int64_t Server::Stats::* member, int back = 0) const {
    const size_t last = stats.size() - 1 - static_cast<size_t>(back);
    return stats[last].*member - stats[last - 1].*member;
  }
};

Outcome run(RankSettings settings, bool static_mode, const Loss& loss,
            int num_steps = kSteps) {
  settings.static_mode = static_mode;
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
      self.step(kMicrobatchesOfReplay, [&](int mb) {
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

// Runs with and without static_mode; the numbers are the same.
Outcome run_both(const RankSettings& settings, const Loss& loss,
                 int num_steps = kSteps) {
  const Outcome dynamic = run(settings, false, loss, num_steps);
  EXPECT_EQ(dynamic.stats.back().replayed_requests, 0);
  const Outcome replayed = run(settings, true, loss, num_steps);
  expect_equal(dynamic, replayed);
  EXPECT_LE(replayed.in_step(&Server::Stats::headers),
            dynamic.in_step(&Server::Stats::headers));
  return replayed;
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

TEST(Replay, of_a_steady_step_takes_no_requests) {
  const Outcome outcome = run_both({.size = 3}, [](Rank& self, int, int mb) {
    return self.arrive(chain_of(self, input(self, mb))).sum();
  });
  const int64_t requests = kMicrobatchesOfReplay * 2 * 4;
  for (const int back : {0, 1, 2}) {
    EXPECT_EQ(outcome.in_step(&Server::Stats::requests, back), requests);
    EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests, back),
              requests);
    EXPECT_EQ(outcome.in_step(&Server::Stats::pushes, back), 0);
    // Besides: loss and ends of backward and microbatch; begin and end.
    EXPECT_EQ(outcome.in_step(&Server::Stats::headers, back) -
                  outcome.in_step(&Server::Stats::replays, back),
              kMicrobatchesOfReplay * 3 * 2 + 2 * 2);
  }
}

TEST(Replay, takes_several_requests_to_one_owner_in_one_message) {
  const Outcome outcome = run_both({.size = 2}, [](Rank& self, int, int mb) {
    at::Tensor x = input(self, mb);
    for (int i = 0; i < 12; ++i) x = self.call_one(1, x);
    return self.arrive(x).sum();
  });
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 24);
  EXPECT_LE(outcome.in_step(&Server::Stats::replays),
            kMicrobatchesOfReplay * 16);
}

TEST(Replay, goes_on_after_steps_that_took_another_way) {
  // Steps 0, 2, 4 ... and 1, 3, 5 ... are two programs with one beginning.
  const Outcome outcome = run_both(
      {.size = 3},
      [](Rank& self, int step, int mb) {
        at::Tensor x = self.call_one(1, input(self, mb));
        x = self.call_one(step % 2 == 0 ? 1 : 2, x);
        return self.arrive(self.call_one(2, x)).sum();
      },
      6);
  const int64_t requests = kMicrobatchesOfReplay * 6;
  // A result that goes to another rank than in the step before is new in one
  // or the other microbatch.
  for (const int back : {0, 1}) {
    EXPECT_GE(outcome.in_step(&Server::Stats::replayed_requests, back),
              requests / 2);
  }
}

TEST(Replay, a_call_that_is_left_out_is_a_deviation_in_the_middle) {
  const Outcome outcome =
      run_both({.size = 3}, [](Rank& self, int step, int mb) {
        at::Tensor x = self.call_one(1, self.call_one(1, input(self, mb)));
        if (step < kSteps - 1 || mb != 2) x = self.call_one(1, x);
        return self.arrive(self.call_one(2, x)).sum();
      });
  const int64_t steady = kMicrobatchesOfReplay * 8;
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests, 1), steady);
  const int64_t last = outcome.in_step(&Server::Stats::replayed_requests);
  // What comes after it is new, and in one or the other microbatch too: its
  // results go another way now.
  EXPECT_GE(last, steady / 2);
  EXPECT_LE(last, steady - 8 + 2);
}

TEST(Replay, microbatches_may_change_places) {
  const Outcome outcome =
      run_both({.size = 2}, [](Rank& self, int step, int mb) {
        at::Tensor x = self.call_one(1, input(self, mb));
        if ((mb + step) % 2 == 0) x = self.call_one(1, x);
        return self.arrive(x).sum();
      });
  EXPECT_GE(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay / 2 * (2 + 4) / 2);
}

TEST(Replay, shapes_may_change) {
  const Outcome outcome =
      run_both({.size = 3}, [](Rank& self, int step, int mb) {
        // Two shapes that were seen before, and a new one at the end.
        const int64_t rows = step == kSteps - 1 && mb == 1 ? 7 : 8 + mb % 2 * 8;
        const at::Tensor x = compute(make_input(mb), self.w).narrow(0, 0, rows);
        return self.arrive(chain_of(self, self.leave(x))).sum();
      });
  const int64_t steady = kMicrobatchesOfReplay * 8;
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests, 1), steady);
  // Questions what will come are the same for each shape, and others are new.
  EXPECT_GE(outcome.in_step(&Server::Stats::replayed_requests), steady - 8);
  EXPECT_LT(outcome.in_step(&Server::Stats::replayed_requests), steady);
}

TEST(Replay, modes_may_change) {
  const Outcome outcome =
      run_both({.size = 2}, [](Rank& self, int step, int mb) {
        const at::Tensor x = input(self, mb);
        const bool training = step != 3;
        const RemoteResult y =
            remote_call(*self.server, 1, 1, training, "call", "mode", {x});
        if (step == 4 && mb == 0) {
          const at::NoGradGuard no_grad;
          self.arrive(self.call_one(1, make_input(mb)));
        }
        return self.arrive(y.tensors[0]).sum();
      });
  EXPECT_LT(outcome.in_step(&Server::Stats::replayed_requests, 1),
            kMicrobatchesOfReplay * 2);
  EXPECT_GE(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 2 - 1);
}

TEST(Replay, arguments_that_always_change_are_sent_each_time) {
  const Outcome outcome = run_both(
      {.size = 2},
      [](Rank& self, int step, int mb) {
        const auto number = std::to_string(step * kMicrobatchesOfReplay + mb);
        const auto x = self.call(1, {input(self, mb)}, number);
        return self.arrive(x.tensors[0]).sum();
      },
      40);
  EXPECT_EQ(outcome.stats.back().replayed_requests, 0);
}

TEST(Replay, begins_anew_when_too_much_was_recorded) {
  constexpr int kChanging = 40;
  const Outcome outcome = run_both(
      {.size = 2},
      [](Rank& self, int step, int mb) {
        const int number =
            step < kChanging ? step * kMicrobatchesOfReplay + mb : -1;
        const auto x = self.call(1, {input(self, mb)}, std::to_string(number));
        return self.arrive(x.tensors[0]).sum();
      },
      kChanging + 4);
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 2);
}

TEST(Replay, small_arguments_come_with_their_own_data) {
  const Outcome outcome =
      run_both({.size = 2}, [](Rank& self, int step, int mb) {
        at::Tensor x = input(self, mb);
        for (int i = 0; i < 3; ++i) {
          at::Tensor factor =
              make_input(step + 3 * mb + i).narrow(0, 0, 1).add(1);
          const auto y = self.call(1, {x, factor});
          factor.fill_(1e9);  // the call is over for its caller
          x = y.tensors[0];
        }
        return self.arrive(x).sum();
      });
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 6);
}

TEST(Replay, arithmetic_elsewhere_is_part_of_the_program) {
  const Outcome outcome = run_both({.size = 3}, [](Rank& self, int, int mb) {
    const at::Tensor x = self.call_one(1, input(self, mb));
    const at::Tensor y = self.call_one(2, x);
    const RemoteRefPtr sum =
        self.server->call_operation(Operation::named("add", false, 0.5),
                                    {remote_ref_of(y), remote_ref_of(x)});
    const at::Tensor value = self.server->fetch(sum).sum();
    return self.arrive(y).sum().add(value);
  });
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 5);
}

TEST(Replay, works_with_stages_of_the_drivers_own) {
  const Outcome outcome =
      run_both({.size = 2, .num_chunks = 2}, [](Rank& self, int, int mb) {
        at::Tensor x = input(self, mb);
        for (int i = 1; i < 4; ++i) x = self.call_one(i, x);
        return self.arrive(x).sum();
      });
  EXPECT_EQ(outcome.in_step(&Server::Stats::replayed_requests),
            kMicrobatchesOfReplay * 4)
      << "what it asks of itself is no message";
}

TEST(Replay, gives_the_same_numbers_with_random_delays) {
  comm::TestDelays::set(11, 500);
  for (const bool has_shared_memory : {false, true}) {
    const Outcome outcome = run_both(
        {.size = 3, .has_shared_memory = has_shared_memory},
        [](Rank& self, int step, int mb) {
          const at::Tensor x = chain_of(self, input(self, mb));
          return self.arrive(mb == step ? self.call_one(1, x) : x).sum();
        });
    EXPECT_GT(outcome.stats.back().replayed_requests, 0);
  }
  comm::TestDelays::set(0, 0);
}

TEST(Replay, an_exception_in_a_module_is_told_as_always) {
  run_servers({.size = 3, .static_mode = true}, [](Rank& self) {
    int num_calls = 0;
    self.modules[2] = [&](std::vector<at::Tensor> inputs) {
      if (++num_calls == 3 * kMicrobatchesOfReplay)
        throw std::runtime_error("broken");
      return std::vector{compute(inputs[0], self.w)};
    };
    const auto body = [&](int mb) {
      if (self.rank != 0) return self.follow(mb);
      const at::Tensor x = self.call_one(1, input(self, mb));
      self.train_on(mb, self.arrive(self.call_one(2, x)).sum());
    };
    self.step(kMicrobatchesOfReplay, body);
    self.step(kMicrobatchesOfReplay, body);
    if (self.rank == 2) {
      EXPECT_THROW(self.step(kMicrobatchesOfReplay, body), std::runtime_error);
      ASSERT_FALSE(self.errors.empty());
      EXPECT_NE(self.errors[0].find("stage2"), std::string::npos);
    } else {
      EXPECT_THROW(self.step(kMicrobatchesOfReplay, body), PeerFailure);
    }
    self.expect_empty();
    if (self.rank == 0) {
      EXPECT_GT(self.server->stats().replayed_requests, 0);
    }
  });
}

}  // namespace
}  // namespace smp::pipeline
