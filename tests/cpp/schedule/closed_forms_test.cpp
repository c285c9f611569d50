// The table of bubbles and peaks that the literature gives for equal stages.
#include <gtest/gtest.h>

#include <algorithm>

#include "csrc/schedule/simulator.h"
#include "tests/cpp/schedule/chains.h"

namespace smp::schedule {
namespace {

// With equal stages every rank has the same work, hence the same bubble.
void expect_bubble(const SimulationResult& result, double bubble_ms,
                   const std::string& where) {
  for (const RankUsage& usage : result.ranks) {
    EXPECT_DOUBLE_EQ(usage.bubble_ms, bubble_ms) << where;
    EXPECT_DOUBLE_EQ(usage.busy_ms + usage.bubble_ms, result.makespan_ms);
  }
}

std::string name_of(int p, int m, int v = 1) {
  return "p " + std::to_string(p) + ", m " + std::to_string(m) + ", v " +
         std::to_string(v);
}

TEST(ClosedForms, fill_drain_keeps_all_microbatches_everywhere) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      const auto result =
          simulate_lists(equal_chain(p, m, m), plan_fill_drain(p, m));
      expect_bubble(result, (p - 1) * 3.0, name_of(p, m));
      for (const RankUsage& usage : result.ranks) {
        EXPECT_EQ(usage.peak_activations, m);
        EXPECT_EQ(usage.peak_activation_bytes, 10 * m);
      }
      EXPECT_EQ(simulate(equal_chain(p, m, m), "simple").executed,
                plan_fill_drain(p, m));
      EXPECT_EQ(make_plan("simple", {p, 1, m}), plan_fill_drain(p, m));
    }
  }
}

TEST(ClosedForms, one_f_one_b_keeps_one_less_per_rank) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      const auto result = simulate_lists(equal_chain(p, m, m), plan_1f1b(p, m));
      expect_bubble(result, (p - 1) * 3.0, name_of(p, m));
      for (int i = 0; i < p; ++i) {
        EXPECT_EQ(result.ranks[i].peak_activations, std::min(m, p - i));
      }
    }
  }
}

TEST(ClosedForms, interleaved_policy_is_1f1b_action_by_action) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      const auto result = simulate(equal_chain(p, m, p), "interleaved");
      EXPECT_EQ(to_string(result.executed), to_string(plan_1f1b(p, m)))
          << name_of(p, m);
      EXPECT_EQ(make_plan("interleaved", {p, 1, m}), plan_1f1b(p, m));
      expect_bubble(result, (p - 1) * 3.0, name_of(p, m));
    }
  }
}

TEST(ClosedForms, more_active_microbatches_cost_memory_and_no_time) {
  const int p = 4;
  const int m = 16;
  const auto result = simulate(equal_chain(p, m, p + 2), "interleaved");
  expect_bubble(result, 9, "p + 2");
  EXPECT_EQ(result.ranks[0].peak_activations, p + 2);
  const auto unlimited = simulate(equal_chain(p, m, m), "interleaved");
  expect_bubble(unlimited, 9, "no limit");
  EXPECT_EQ(unlimited.ranks[0].peak_activations, 3 * (p - 1) + 1);
}

TEST(ClosedForms, virtual_stages_divide_the_bubble) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 2; v <= 4; ++v) {
      for (int m = p; m <= 4 * p; m += p) {
        const auto input = equal_chain(p, m, m, v);
        const auto result =
            simulate_lists(input, make_plan("virtual_interleaved", {p, v, m}));
        // A chunk takes 1/v of the stage, so (p-1)(F+B+W)/v is p-1 chunks.
        expect_bubble(result, (p - 1) * 3.0, name_of(p, m, v));
        EXPECT_EQ(result.ranks[0].peak_activations,
                  std::min(m * v, p * v + p - 1))
            << name_of(p, m, v);
      }
    }
  }
}

TEST(ClosedForms, virtual_policy_has_the_bubble_and_peak_of_the_plan) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (int m = p; m <= 4 * p; m += p) {
        const auto input = equal_chain(p, m, 0, v);
        const auto result = simulate(input, "virtual_interleaved");
        const auto plan = make_plan("virtual_interleaved", {p, v, m});
        const auto planned = simulate_lists(input, plan);
        expect_bubble(result, (p - 1) * 3.0, name_of(p, m, v));
        for (int i = 0; i < p; ++i) {
          EXPECT_LE(result.ranks[i].peak_activations,
                    planned.ranks[i].peak_activations);
        }
        // Beyond 4 ranks the plan waits for a forward where the policy runs a
        // backward that is ready.
        if (p <= 4) {
          EXPECT_EQ(to_string(result.executed), to_string(plan));
        }
      }
    }
  }
}

TEST(ClosedForms, zero_bubble_h1_has_a_third_and_p_everywhere) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 2 * p; m <= 32; ++m) {
      const auto result = simulate_lists(equal_chain(p, m, m),
                                         make_plan("zero_bubble", {p, 1, m}));
      // (p-1)(F+B-W)
      expect_bubble(result, p - 1.0, name_of(p, m));
      for (const RankUsage& usage : result.ranks) {
        EXPECT_EQ(usage.peak_activations, p) << name_of(p, m);
      }
    }
  }
}

TEST(ClosedForms, zero_bubble_policy_is_the_generated_plan) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 32; ++m) {
      const auto input = equal_chain(p, m, 0);
      const auto result = simulate(input, "zero_bubble");
      const auto plan = make_plan("zero_bubble", {p, 1, m});
      if (m >= p) {
        EXPECT_EQ(to_string(result.executed), to_string(plan)) << name_of(p, m);
      } else {
        // The policy also fills gaps of a pipeline that is never full.
        EXPECT_LE(result.makespan_ms, simulate_lists(input, plan).makespan_ms);
      }
    }
  }
}

// Filling each gap would cost a weight gradient per rank.
TEST(ClosedForms, messages_cost_zero_bubble_no_more_than_their_own_time) {
  const double latency_ms = 0.01;
  for (int p = 2; p <= 4; ++p) {
    for (int m = p; m <= 32; ++m) {
      auto input = equal_chain(p, m, 0);
      const double without_ms = simulate(input, "zero_bubble").makespan_ms;
      input.boundaries.assign(p - 1, BoundaryCost{latency_ms, 0, 0, 0});
      EXPECT_LE(simulate(input, "zero_bubble").makespan_ms,
                without_ms + 4 * p * latency_ms)
          << name_of(p, m);
    }
  }
}

TEST(ClosedForms, weight_gradients_that_cost_nothing_leave_1f1b) {
  auto input = equal_chain(4, 8, 4);
  for (StageCost& stage : input.stages) {
    stage.backward_ms = 2;
    stage.weight_ms = 0;
  }
  EXPECT_EQ(simulate(input, "zero_bubble").makespan_ms,
            simulate(input, "interleaved").makespan_ms);
}

}  // namespace
}  // namespace smp::schedule
