#include "csrc/schedule/policy.h"

#include <gtest/gtest.h>

#include <random>

#include "csrc/common/check.h"

namespace smp::schedule {
namespace {

ReadyTask task(Phase phase, int64_t mb, int64_t arrival) {
  ReadyTask ready;
  ready.key.phase = phase;
  ready.key.mb = mb;
  ready.arrival = arrival;
  return ready;
}

TEST(Policy, unknown_name_is_refused_with_the_valid_ones) {
  try {
    make_policy("1f1b");
    FAIL() << "no error";
  } catch (const ValueError& e) {
    EXPECT_NE(std::string(e.what()).find("'interleaved' or 'simple'"),
              std::string::npos);
  }
}

TEST(Policy, interleaved_prefers_backward_then_old_microbatch_then_arrival) {
  const auto policy = make_policy("interleaved");
  EXPECT_EQ(
      policy->pick({task(Phase::kForward, 0, 0), task(Phase::kBackward, 3, 1)},
                   {}),
      1u);
  EXPECT_EQ(
      policy->pick({task(Phase::kBackward, 2, 0), task(Phase::kBackward, 1, 1)},
                   {}),
      1u);
  EXPECT_EQ(policy->pick(
                {task(Phase::kForward, 1, 7), task(Phase::kForward, 1, 4)}, {}),
            1u);
  EXPECT_FALSE(policy->pick({}, {}).has_value());
}

TEST(Policy, simple_holds_backward_until_all_forwards_are_done) {
  const auto policy = make_policy("simple");
  StepProgress busy;
  busy.num_microbatches = 4;
  busy.num_forwards_pending = 2;
  EXPECT_FALSE(policy->pick({task(Phase::kBackward, 0, 0)}, busy).has_value());
  EXPECT_EQ(
      policy->pick({task(Phase::kBackward, 0, 0), task(Phase::kForward, 3, 1)},
                   busy),
      1u);
  StepProgress done;
  EXPECT_EQ(
      policy->pick({task(Phase::kBackward, 1, 0), task(Phase::kBackward, 0, 1)},
                   done),
      1u);
}

TEST(Policy, choice_does_not_depend_on_the_order_of_the_list) {
  std::mt19937 random(7);
  for (const char* name : {"interleaved", "simple"}) {
    const auto policy = make_policy(name);
    for (int round = 0; round < 200; ++round) {
      std::vector<ReadyTask> tasks;
      const int n = 1 + static_cast<int>(random() % 6);
      for (int i = 0; i < n; ++i) {
        tasks.push_back(task(random() % 2 ? Phase::kForward : Phase::kBackward,
                             random() % 4, i));
      }
      StepProgress progress;
      progress.num_forwards_pending = static_cast<int>(random() % 2);
      const auto first = policy->pick(tasks, progress);
      const int64_t chosen = first ? tasks[*first].arrival : -1;
      std::shuffle(tasks.begin(), tasks.end(), random);
      const auto second = policy->pick(tasks, progress);
      EXPECT_EQ(second ? tasks[*second].arrival : -1, chosen);
    }
  }
}

TEST(Task, text_form_names_phase_microbatch_module_visit_and_resumption) {
  EXPECT_EQ(to_string(TaskKey{Phase::kForward, 3, TaskKey::kStepBody, 0, 0}),
            "F3");
  EXPECT_EQ(to_string(TaskKey{Phase::kBackward, 2, 17, 1, 0}), "B2:m17.1");
  EXPECT_EQ(to_string(TaskKey{Phase::kForward, 0, 5, 0, 2}), "F0:m5/2");
}

}  // namespace
}  // namespace smp::schedule
