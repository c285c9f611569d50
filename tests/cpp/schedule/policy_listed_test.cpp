#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"
#include "csrc/schedule/simulator.h"
#include "tests/cpp/schedule/chains.h"

namespace smp::schedule {
namespace {

std::vector<ReadyTask> ready(const std::string& text) {
  std::vector<ReadyTask> tasks;
  for (const Action& action : parse_actions(text)) {
    ReadyTask task;
    task.key = {action.phase, action.mb, 0, 0, 0};
    task.chunk = action.chunk;
    task.arrival = static_cast<int64_t>(tasks.size());
    tasks.push_back(task);
  }
  return tasks;
}

// Returns what a policy with this list picks, as text; "-" if it waits.
std::string picked(const std::string& list, const std::string& begun,
                   const std::string& offered,
                   const std::vector<int64_t>& ended = {}) {
  const auto policy = make_listed_policy(parse_actions(list));
  const ActionList history = parse_actions(begun);
  StepProgress progress;
  progress.begun = history;
  progress.ended = ended;
  const auto tasks = ready(offered);
  const auto choice = policy->pick(tasks, progress);
  return choice ? to_string(tasks[*choice].action()) : "-";
}

TEST(ListedPolicy, waits_for_its_next_entry) {
  EXPECT_EQ(picked("F0 F1 B0 B1", "F0 F1", "B1"), "-");
  EXPECT_EQ(picked("F0 F1 B0 B1", "F0 F1", "B1 B0"), "B0");
  EXPECT_EQ(picked("F0 F1 B0 B1", "", "F1"), "-");
  EXPECT_EQ(picked("F0 F0.1", "F0", "F0.1"), "F0.1");
}

TEST(ListedPolicy, a_further_part_of_a_begun_entry_goes_first) {
  EXPECT_EQ(picked("F0 F1 F2", "F0 F1", "F2 F1 F0"), "F0");
}

TEST(ListedPolicy, what_the_list_does_not_name_runs_while_it_would_wait) {
  EXPECT_EQ(picked("F0 B0", "F0", "F7"), "F7");
  EXPECT_EQ(picked("F0 B0", "F0", "F7 B0"), "B0");
  EXPECT_EQ(picked("F0 B0", "F0 B0", "F8 F7 B7"), "B7");
}

TEST(ListedPolicy, entries_of_ended_microbatches_are_passed_over) {
  EXPECT_EQ(picked("F0 B0 F1 B1", "F0", "F1"), "-");
  EXPECT_EQ(picked("F0 B0 F1 B1", "F0", "F1", {0}), "F1");
}

TEST(ListedPolicy, splits_the_backwards_whose_weight_part_is_listed) {
  const auto policy = make_listed_policy(parse_actions("F0 F1 B0 W0 B1"));
  EXPECT_TRUE(policy->splits_backward(0, 0));
  EXPECT_FALSE(policy->splits_backward(1, 0));
}

TEST(ListedPolicy, lists_that_make_no_sense_are_refused) {
  EXPECT_THROW(make_listed_policy(parse_actions("F0 F0")), ValueError);
  EXPECT_THROW(make_listed_policy(parse_actions("F0 W0 B0")), ValueError);
}

TEST(ListedPolicy, replays_every_generated_plan) {
  const int p = 4;
  const int m = 8;
  for (const char* name :
       {"simple", "interleaved", "virtual_interleaved", "zero_bubble"}) {
    const int v = std::string(name) == "virtual_interleaved" ? 2 : 1;
    const Schedule plan = make_plan(name, {p, v, m});
    EXPECT_EQ(simulate_lists(equal_chain(p, m, m, v), plan).executed, plan)
        << name;
  }
}

TEST(ListedPolicy, replays_what_a_policy_has_executed) {
  auto input = equal_chain(3, 6, 5);
  input.stages[1].forward_ms = 2.5;
  input.stages[2].backward_ms = 0.3;
  for (const char* name : {"simple", "interleaved", "zero_bubble"}) {
    const auto first = simulate(input, name);
    const auto again =
        simulate_lists(input, parse_schedule(to_string(first.executed)));
    EXPECT_EQ(again.executed, first.executed) << name;
    EXPECT_LE(again.makespan_ms, first.makespan_ms + 1e-9) << name;
  }
}

}  // namespace
}  // namespace smp::schedule
