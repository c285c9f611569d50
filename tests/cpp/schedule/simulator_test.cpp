#include "csrc/schedule/simulator.h"

#include <gtest/gtest.h>

#include <functional>

#include "csrc/common/check.h"
#include "tests/cpp/schedule/chains.h"

namespace smp::schedule {
namespace {

using Policies = std::vector<const Policy*>;

std::string complaint_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Simulator, one_microbatch_takes_the_sum_of_its_parts) {
  SimulationInput input;
  input.stages = {{0, 1, 2, 0, 0}, {1, 3, 4, 0, 0}};
  input.boundaries = {{0.5, 0.001, 1000, 250}};
  const auto result = simulate(input, "interleaved");
  // F0, latency and 1 ms forward, F0 and B0, latency and 0.25 ms back, B0.
  EXPECT_DOUBLE_EQ(result.makespan_ms, 1 + 0.5 + 1 + 3 + 4 + 0.5 + 0.25 + 2);
  EXPECT_DOUBLE_EQ(result.ranks[0].busy_ms, 3);
  EXPECT_DOUBLE_EQ(result.ranks[1].bubble_ms, result.makespan_ms - 7);
  ASSERT_EQ(result.timeline.size(), 4u);
  EXPECT_EQ(result.timeline[1].rank, 1);
  EXPECT_EQ(result.timeline[1].stage, 1);
  EXPECT_EQ(to_string(result.timeline[1].action), "F0");
  EXPECT_DOUBLE_EQ(result.timeline[1].start_ms, 2.5);
  EXPECT_DOUBLE_EQ(result.timeline[1].end_ms, 5.5);
}

TEST(Simulator, bytes_of_one_link_pass_one_after_the_other) {
  SimulationInput input;
  input.stages = {{0, 1, 0, 0, 0}, {1, 1, 0, 0, 0}};
  input.boundaries = {{5, 1, 3, 0}};  // 3 ms on the wire, then 5 ms latency
  input.num_microbatches = 3;
  input.active_microbatches = 3;
  const auto result = simulate(input, "simple");
  std::vector<double> starts;
  for (const TimelineEntry& entry : result.timeline) {
    if (entry.stage == 1 && entry.action.phase == Phase::kForward) {
      starts.push_back(entry.start_ms);
    }
  }
  EXPECT_EQ(starts, (std::vector<double>{9, 12, 15}));
}

TEST(Simulator, loss_on_the_driver_is_a_second_stage_of_its_rank) {
  SimulationInput input;
  input.stages = {{0, 1, 2, 0, 0}, {1, 1, 2, 0, 0}, {0, 0.25, 0.25, 0, 0}};
  input.num_microbatches = 3;
  input.active_microbatches = 3;
  const auto result = simulate(input, "interleaved");
  EXPECT_EQ(to_string(result.executed),
            "0: F0 F1 F0.1 B0.1 F2 F1.1 B1.1 B0 B1 F2.1 B2.1 B2\n"
            "1: F0 F1 B0 B1 F2 B2\n");
  EXPECT_DOUBLE_EQ(result.ranks[0].busy_ms, 3 * 3.5);
}

TEST(Simulator, simple_holds_backwards_until_the_last_forward_has_arrived) {
  // The first stage is slow: without the driver's word the second would go
  // back between two forwards.
  auto input = equal_chain(2, 4, 4);
  input.stages[0].forward_ms = 9;
  EXPECT_EQ(simulate(input, "simple").executed, plan_fill_drain(2, 4));
}

TEST(Simulator, driver_lets_in_no_more_than_active_microbatches) {
  for (int active = 1; active <= 6; ++active) {
    for (const char* name :
         {"simple", "interleaved", "virtual_interleaved", "zero_bubble"}) {
      const auto result = simulate(equal_chain(3, 6, active), name);
      int64_t in_flight = 0;
      int64_t most = 0;
      for (const Action& action : result.executed[0]) {
        if (action.phase == Phase::kForward) ++in_flight;
        if (action.phase == Phase::kBackward) --in_flight;
        most = std::max(most, in_flight);
      }
      EXPECT_LE(most, active) << name;
      EXPECT_EQ(in_flight, 0) << name;
    }
  }
}

TEST(Simulator, default_number_of_active_microbatches_is_the_policys) {
  EXPECT_EQ(
      simulate(equal_chain(4, 16, 0), "interleaved").ranks[0].peak_activations,
      6);
  EXPECT_EQ(simulate(equal_chain(4, 16, 0), "simple").ranks[0].peak_activations,
            16);
  EXPECT_EQ(
      simulate(equal_chain(4, 16, 0), "zero_bubble").ranks[3].peak_activations,
      4);
}

TEST(Simulator, policies_may_differ_between_ranks) {
  const auto interleaved = make_policy("interleaved");
  const auto listed = make_listed_policy(plan_1f1b(2, 4)[1]);
  EXPECT_EQ(
      simulate(equal_chain(2, 4, 2), Policies{interleaved.get(), listed.get()})
          .executed,
      plan_1f1b(2, 4));
}

TEST(Simulator, deadlock_names_the_next_action_of_each_rank_and_its_wait) {
  // Rank 0 wants B0 before F1, rank 1 wants F1 before B0.
  const auto lists = parse_schedule(
      "0: F0 B0 F1 B1\n"
      "1: F0 F1 B0 B1\n");
  EXPECT_EQ(complaint_of([&] { simulate_lists(equal_chain(2, 2, 2), lists); }),
            "this schedule comes to a stop after 2 ms:\n"
            "  rank 0: next is B0, which waits for B0 of rank 1\n"
            "  rank 1: next is F1, which waits for F1 of rank 0");
}

TEST(Simulator, deadlock_by_admission_names_the_limit) {
  EXPECT_EQ(complaint_of([] {
              simulate_lists(equal_chain(2, 4, 2), plan_fill_drain(2, 4));
            }),
            "this schedule comes to a stop after 3 ms:\n"
            "  rank 0: next is F2, which waits for a microbatch to end: 2 of "
            "at most 2 are in flight\n"
            "  rank 1: next is F2, which waits for F2 of rank 0");
}

TEST(Simulator, deadlock_tells_ranks_that_are_done_and_orders_of_bodies) {
  EXPECT_EQ(complaint_of([] {
              simulate_lists(equal_chain(1, 2, 2),
                             parse_schedule("0: F1 B1 F0 B0"));
            }),
            "this schedule comes to a stop after 0 ms:\n"
            "  rank 0: next is F1, which waits for F0 of rank 0");
  // A driver that never turns round.
  class Stubborn final : public Policy {
   public:
    const std::string& name() const override {
      static const std::string text = "stubborn";
      return text;
    }
    std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                               const StepProgress&) const override {
      if (ready[0].key.mb > 0) return std::nullopt;
      return 0;
    }
    int default_active_microbatches(int, int m) const override { return m; }
    bool may_begin_backward(const StepProgress&) const override {
      return false;
    }
  };
  const Stubborn stubborn;
  EXPECT_EQ(complaint_of(
                [&] { simulate(equal_chain(1, 1, 1), Policies{&stubborn}); }),
            "this schedule comes to a stop after 1 ms:\n"
            "  rank 0: next is B0, which waits for the driver's policy "
            "'stubborn' to begin the backward of microbatch 0");
  const auto plain = make_policy("interleaved");
  EXPECT_EQ(complaint_of([&] {
              simulate(equal_chain(2, 2, 2), Policies{plain.get(), &stubborn});
            }),
            "this schedule comes to a stop after 2 ms:\n"
            "  rank 0: next is B0, which waits for B0 of rank 1\n"
            "  rank 1: could run B0, but policy 'stubborn' holds it back");
}

TEST(Simulator, costs_and_lists_that_make_no_sense_are_refused) {
  const auto text = [](const std::function<void(SimulationInput&)>& change) {
    auto input = equal_chain(2, 2, 2);
    change(input);
    return complaint_of([&] { simulate(input, "interleaved"); });
  };
  EXPECT_EQ(text([](auto& in) { in.stages.clear(); }),
            "a simulation needs at least one stage");
  EXPECT_EQ(text([](auto& in) { in.stages[0].forward_ms = -1; }),
            "stage 0: forward_ms must be between 0 and 1e+06 ms, got -1");
  EXPECT_EQ(text([](auto& in) { in.stages[1].rank = 0; }), "no error");
  EXPECT_EQ(text([](auto& in) { in.stages[0].rank = 1; }),
            "rank 0 of 2 has no stage; count ranks without gaps");
  EXPECT_EQ(text([](auto& in) { in.stages[0].rank = 7; }),
            "the ranks of 2 stages are counted from 0 without gaps, got rank "
            "7");
  EXPECT_EQ(text([](auto& in) { in.boundaries.resize(2); }),
            "2 stages have 1 boundaries, got 2");
  EXPECT_EQ(text([](auto& in) { in.boundaries = {{0, 0, -5, 0}}; }),
            "boundary 0: forward_bytes must not be negative, got -5");
  EXPECT_EQ(text([](auto& in) { in.num_microbatches = 0; }),
            "num_microbatches must be 1 or more, got 0");
  const auto listed = [](const char* lists) {
    return complaint_of(
        [&] { simulate_lists(equal_chain(1, 2, 2), parse_schedule(lists)); });
  };
  EXPECT_EQ(listed("0: F0 B0 F1"),
            "the list of rank 0 lacks B1; each forward and backward has to be "
            "there");
  EXPECT_EQ(listed("0: F0 B0 F2"),
            "the list of rank 0 has F2, but there are 2 microbatches");
  EXPECT_EQ(listed("0: F0.1 B0"),
            "the list of rank 0 has F0.1, but the rank has 1 stage");
}

TEST(Generators, sizes_and_names_that_make_no_sense_are_refused) {
  EXPECT_THROW(make_plan("1f1b", {2, 1, 2}), ValueError);
  EXPECT_THROW(make_plan("interleaved", {0, 1, 2}), ValueError);
  EXPECT_THROW(make_plan("interleaved", {2, 2, 2}), ValueError);
  EXPECT_THROW(make_plan("virtual_interleaved", {4, 2, 6}), ValueError);
  EXPECT_EQ(to_string(make_plan("zero_bubble", {2, 1, 3})),
            "0: F0 F1 B0 W0 F2 B1 W1 B2 W2\n"
            "1: F0 B0 F1 B1 W0 F2 B2 W1 W2\n");
}

}  // namespace
}  // namespace smp::schedule
