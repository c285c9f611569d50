// Whatever the stages cost, every policy brings every step to its end and keeps
// the rules. Seeds are fixed, so a failure can be run again.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "csrc/schedule/simulator.h"
#include "tests/cpp/schedule/chains.h"

namespace smp::schedule {
namespace {

struct Case {
  SimulationInput input;
  std::string text;
};

Case random_case(std::mt19937& random) {
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  // Some tasks take no time at all, some far longer than the others.
  const auto ms = [&] {
    if (number(0, 9) == 0) return number(0, 1) * 50.0;
    return number(1, 4000) * 1e-3;
  };
  Case c;
  const int p = number(1, 8);
  const int v = number(1, 3);
  for (int s = 0; s < p * v; ++s) {
    c.input.stages.push_back({s % p, ms(), ms(), ms(), number(0, 99)});
  }
  // A loss on the driver; or stages in any order.
  if (number(0, 3) == 0) {
    c.input.stages.push_back({0, ms(), ms(), ms(), number(0, 99)});
  }
  if (number(0, 3) == 0) std::ranges::shuffle(c.input.stages, random);
  if (number(0, 1) == 0) {
    c.input.boundaries.resize(c.input.stages.size() - 1);
    for (BoundaryCost& boundary : c.input.boundaries) {
      boundary = {ms() * 0.1, 1e-3, number(0, 900), number(0, 900)};
    }
  }
  c.input.num_microbatches = number(1, 16);
  c.input.active_microbatches = number(1, c.input.num_microbatches);
  c.text = "p " + std::to_string(p) + ", v " + std::to_string(v) + ", m " +
           std::to_string(c.input.num_microbatches) + ", active " +
           std::to_string(c.input.active_microbatches);
  return c;
}

// When each (stage, phase, microbatch) ran.
using Times = std::map<std::tuple<int, Phase, int64_t>, TimelineEntry>;

void expect_rules(const SimulationInput& input, const SimulationResult& result,
                  bool is_split, const std::string& where) {
  Times times;
  std::map<int, double> free_ms;
  for (const TimelineEntry& e : result.timeline) {
    EXPECT_TRUE(
        times.emplace(std::tuple(e.stage, e.action.phase, e.action.mb), e)
            .second)
        << where;
    EXPECT_GE(e.start_ms, free_ms[e.rank] - 1e-9) << where << ": two at once";
    free_ms[e.rank] = e.end_ms;
  }
  const int last = static_cast<int>(input.stages.size()) - 1;
  ASSERT_EQ(times.size(), static_cast<size_t>((is_split ? 3 : 2) * (last + 1) *
                                              input.num_microbatches))
      << where;
  const auto expect_order = [&](const TimelineEntry& first,
                                const TimelineEntry& second) {
    EXPECT_GE(second.start_ms, first.end_ms - 1e-9)
        << where << ": " << to_string(second.action) << " of stage "
        << second.stage << " before " << to_string(first.action) << " of stage "
        << first.stage;
  };
  for (int mb = 0; mb < input.num_microbatches; ++mb) {
    const auto at = [&](int stage, Phase phase) {
      return times.at({stage, phase, mb});
    };
    for (int s = 0; s <= last; ++s) {
      if (s > 0) {
        expect_order(at(s - 1, Phase::kForward), at(s, Phase::kForward));
        expect_order(at(s, Phase::kBackward), at(s - 1, Phase::kBackward));
      }
      if (is_split) {
        expect_order(at(s, Phase::kBackward), at(s, Phase::kWeight));
      }
    }
    expect_order(at(last, Phase::kForward), at(last, Phase::kBackward));
    if (mb >= input.active_microbatches) {
      // At most active - 1 of all microbatches before are still in flight.
      int num_over = 0;
      for (int other = 0; other < mb; ++other) {
        num_over += times.at({0, Phase::kBackward, other}).end_ms <=
                    at(0, Phase::kForward).start_ms + 1e-9;
      }
      EXPECT_GE(num_over, mb - input.active_microbatches + 1) << where;
    }
  }
}

class Sweep : public testing::TestWithParam<std::string> {};

TEST_P(Sweep, every_step_ends_and_keeps_order_and_limits) {
  std::mt19937 random(2024);
  const bool is_split = make_policy(GetParam())->splits_backward(0, 0);
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(random);
    const auto result = simulate(c.input, GetParam());
    expect_rules(c.input, result, is_split, c.text);
    const auto again = simulate(c.input, GetParam());
    EXPECT_EQ(again.executed, result.executed) << c.text;
    EXPECT_EQ(again.makespan_ms, result.makespan_ms) << c.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Sweep, testing::ValuesIn(policy_names()),
                         [](const auto& info) { return info.param; });

TEST_P(Sweep, a_rank_keeps_no_more_microbatches_than_the_policy_says) {
  const PolicyPtr policy = make_policy(GetParam());
  const int v = policy->default_chunks();
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 3 * p; ++m) {
      for (int active = std::min(p, m); active <= m; ++active) {
        const auto result = simulate(equal_chain(p, m, active, v), GetParam());
        for (int depth = 0; depth < p; ++depth) {
          const int64_t num_units = result.ranks[depth].peak_activations;
          EXPECT_LE((num_units + v - 1) / v,
                    policy->kept_microbatches({p, v, m}, active, depth))
              << "p " << p << ", m " << m << ", active " << active << ", depth "
              << depth;
        }
      }
    }
  }
}

TEST_P(Sweep, defaults_make_sense_for_all_sizes) {
  const PolicyPtr policy = make_policy(GetParam());
  EXPECT_GE(policy->default_chunks(), 1);
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      EXPECT_GE(policy->default_active_microbatches(p, m), 1);
    }
    const PipelineSize size{p, policy->default_chunks(), 2 * p};
    EXPECT_EQ(make_plan(GetParam(), size).size(), static_cast<size_t>(p));
  }
}

TEST(InterleavedLimit, costs_no_time_worth_naming) {
  // Ranks behind the driver keep fewer microbatches than they could; against
  // the step of a plain backward-first policy that is no loss on the whole.
  class Greedy final : public Policy {
   public:
    const std::string& name() const override { return inner_->name(); }
    std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                               const StepProgress& progress) const override {
      StepProgress plain = progress;
      plain.active_microbatches = 0;
      return inner_->pick(ready, plain);
    }
    int default_active_microbatches(int p, int m) const override {
      return inner_->default_active_microbatches(p, m);
    }

   private:
    std::unique_ptr<Policy> inner_ = make_policy("interleaved");
  };
  std::mt19937 random(5);
  std::uniform_real_distribution<double> ms(0.8, 1.2);
  double limited = 0;
  double greedy = 0;
  for (int round = 0; round < 200; ++round) {
    SimulationInput input;
    const int p = 2 + static_cast<int>(random() % 7);
    for (int s = 0; s < p; ++s) {
      const double forward = ms(random);
      input.stages.push_back({s, forward, 2 * forward, 0, 0});
    }
    input.num_microbatches = 2 * p;
    const Greedy policy;
    limited += simulate(input, "interleaved").makespan_ms;
    greedy +=
        simulate(input, std::vector<const Policy*>(p, &policy)).makespan_ms;
  }
  EXPECT_LT(limited, 1.005 * greedy);
}

}  // namespace
}  // namespace smp::schedule
