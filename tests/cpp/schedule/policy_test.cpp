#include "csrc/schedule/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "csrc/common/check.h"
#include "csrc/schedule/schedule_text.h"

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
    for (const std::string& name : policy_names()) {
      EXPECT_NE(std::string(e.what()).find("'" + name + "'"),
                std::string::npos);
    }
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
  for (const std::string& name : policy_names()) {
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

// Rank 2 of 4 with 4 active microbatches: 1F1B keeps two here.
StepProgress third_of_four(const ActionList& begun) {
  StepProgress progress;
  progress.num_microbatches = 8;
  progress.num_partitions = 4;
  progress.depth = 2;
  progress.active_microbatches = 4;
  progress.begun = begun;
  return progress;
}

TEST(Policy, forward_waits_while_1f1b_would_keep_no_more) {
  const ActionList two = parse_actions("F0 F1");
  for (const char* name : {"interleaved", "zero_bubble"}) {
    const auto policy = make_policy(name);
    const std::vector<ReadyTask> next = {task(Phase::kForward, 2, 0)};
    EXPECT_FALSE(policy->pick(next, third_of_four(two)).has_value()) << name;
    // Not without knowing the limit, not with one kept less, and never before
    // microbatches that come later.
    EXPECT_TRUE(policy->pick(next, {}).has_value()) << name;
    const ActionList one_left = parse_actions("F0 F1 B0");
    EXPECT_TRUE(policy->pick(next, third_of_four(one_left)).has_value())
        << name;
    const ActionList later = parse_actions("F3 F4 F5");
    EXPECT_TRUE(policy->pick(next, third_of_four(later)).has_value()) << name;
    // One whose backward has further modules on this rank is still kept.
    const std::vector<int64_t> first = {0};
    StepProgress goes_back = third_of_four(one_left);
    goes_back.going_back = first;
    EXPECT_FALSE(policy->pick(next, goes_back).has_value()) << name;
    goes_back.ended = first;
    EXPECT_TRUE(policy->pick(next, goes_back).has_value()) << name;
    // A microbatch that is over counts no more, backward or not.
    const std::vector<int64_t> ended = {1};
    StepProgress over = third_of_four(two);
    over.ended = ended;
    EXPECT_TRUE(policy->pick(next, over).has_value()) << name;
  }
}

TEST(Policy, more_active_microbatches_than_ranks_let_every_rank_keep_more) {
  const ActionList begun = parse_actions("F0 F1");
  StepProgress progress = third_of_four(begun);
  progress.active_microbatches = 5;
  EXPECT_TRUE(make_policy("interleaved")
                  ->pick({task(Phase::kForward, 2, 0)}, progress)
                  .has_value());
}

TEST(Policy, virtual_interleaved_passes_chunk_after_chunk_within_a_group) {
  const auto policy = make_policy("virtual_interleaved");
  StepProgress progress;
  progress.num_microbatches = 8;
  progress.num_partitions = 4;
  progress.num_chunks = 2;
  progress.depth = 3;
  ReadyTask second = task(Phase::kForward, 3, 0);
  second.chunk = 1;
  EXPECT_EQ(policy->pick({task(Phase::kForward, 4, 1), second}, progress), 1u);
  EXPECT_EQ(policy->pick({task(Phase::kForward, 2, 1), second}, progress), 0u);
  // The last rank keeps (v - 1) p + 1 units: five are open before F1.1.
  const ActionList begun = parse_actions("F0 F1 F2 F3 F0.1");
  progress.active_microbatches = 8;
  progress.begun = begun;
  second.key.mb = 1;
  ReadyTask back = task(Phase::kBackward, 0, 2);
  back.chunk = 1;
  EXPECT_FALSE(policy->pick({second}, progress).has_value());
  EXPECT_EQ(policy->pick({second, back}, progress), 1u);
  const ActionList gone_back = parse_actions("F0 F1 F2 F3 F0.1 B0.1");
  progress.begun = gone_back;
  EXPECT_EQ(policy->pick({second, task(Phase::kBackward, 0, 2)}, progress), 0u);
}

TEST(Policy, zero_bubble_puts_off_as_many_weight_gradients_as_its_depth) {
  const auto policy = make_policy("zero_bubble");
  StepProgress progress;
  progress.depth = 1;
  const auto w = [](int64_t mb) { return task(Phase::kWeight, mb, mb); };
  EXPECT_EQ(policy->pick({w(0), task(Phase::kBackward, 1, 9)}, progress), 1u);
  EXPECT_EQ(policy->pick({w(1), task(Phase::kBackward, 2, 9), w(0)}, progress),
            2u);
  EXPECT_EQ(policy->pick({w(0)}, progress), 0u);
  EXPECT_TRUE(policy->splits_backward(0, 0));
  EXPECT_FALSE(make_policy("interleaved")->splits_backward(0, 0));
}

// A task in a gap that is as long as a message takes costs more than it saves.
TEST(Policy, zero_bubble_waits_for_a_backward_with_weight_gradients_at_hand) {
  const auto policy = make_policy("zero_bubble");
  const ActionList begun = parse_actions("F0 F1 B0 F2 B1");
  StepProgress progress = third_of_four(begun);
  progress.depth = 1;
  const std::vector<ReadyTask> one = {task(Phase::kWeight, 0, 0)};
  EXPECT_FALSE(policy->pick(one, progress).has_value());
  // Not with more than may be put off, nor where ranks put off many.
  const std::vector<ReadyTask> two = {task(Phase::kWeight, 0, 0),
                                      task(Phase::kWeight, 1, 1)};
  EXPECT_EQ(policy->pick(two, progress), 0u);
  progress.depth = 0;
  EXPECT_EQ(policy->pick(one, progress), 0u);
  std::vector<ReadyTask> six;
  for (int mb = 0; mb < 6; ++mb) six.push_back(task(Phase::kWeight, mb, mb));
  progress.depth = 8;
  EXPECT_FALSE(policy->pick(six, progress).has_value());
  six.push_back(task(Phase::kWeight, 6, 6));
  EXPECT_EQ(policy->pick(six, progress), 0u);
  // Nor behind the last backward, or the end of microbatches without one.
  progress.depth = 1;
  progress.num_microbatches = 2;
  EXPECT_EQ(policy->pick(one, progress), 0u);
  progress.num_microbatches = 3;
  EXPECT_FALSE(policy->pick(one, progress).has_value());
  const std::vector<int64_t> ended = {2};
  progress.ended = ended;
  EXPECT_EQ(policy->pick(one, progress), 0u);
}

TEST(Policy, only_simple_keeps_the_driver_from_beginning_a_backward) {
  StepProgress busy;
  busy.num_forwards_pending = 1;
  for (const std::string& name : policy_names()) {
    EXPECT_EQ(make_policy(name)->may_begin_backward(busy), name != "simple");
  }
  EXPECT_FALSE(make_policy("simple")->may_begin_backward(busy));
  EXPECT_TRUE(make_policy("simple")->may_begin_backward({}));
}

TEST(Policy, default_active_microbatches_follow_the_schedule) {
  EXPECT_EQ(make_policy("interleaved")->default_active_microbatches(4, 16), 6);
  EXPECT_EQ(make_policy("simple")->default_active_microbatches(4, 16), 16);
  EXPECT_EQ(
      make_policy("virtual_interleaved")->default_active_microbatches(4, 16),
      8);
  EXPECT_EQ(make_policy("zero_bubble")->default_active_microbatches(4, 16), 4);
}

TEST(Policy, kept_microbatches_follow_the_schedule) {
  const auto kept = [](const char* name, PipelineSize size, int active) {
    std::vector<int> counts;
    for (int depth = 0; depth < size.num_partitions; ++depth) {
      counts.push_back(
          make_policy(name)->kept_microbatches(size, active, depth));
    }
    return counts;
  };
  using Counts = std::vector<int>;
  EXPECT_EQ(kept("interleaved", {4, 1, 8}, 4), (Counts{4, 3, 2, 1}));
  EXPECT_EQ(kept("interleaved", {4, 1, 8}, 6), (Counts{6, 5, 4, 3}));
  EXPECT_EQ(kept("interleaved", {4, 1, 2}, 2), (Counts{2, 2, 2, 1}));
  EXPECT_EQ(kept("simple", {3, 1, 6}, 6), (Counts{6, 6, 6}));
  EXPECT_EQ(kept("zero_bubble", {4, 1, 8}, 4), (Counts{4, 4, 4, 4}));
  // 11 units of half a microbatch on the first rank, 5 on the last.
  EXPECT_EQ(kept("virtual_interleaved", {4, 2, 8}, 8), (Counts{6, 5, 4, 3}));
  EXPECT_EQ(kept("virtual_interleaved", {4, 1, 8}, 8), (Counts{4, 3, 2, 1}));
}

TEST(Task, text_form_names_phase_microbatch_module_visit_and_resumption) {
  EXPECT_EQ(to_string(TaskKey{Phase::kForward, 3, TaskKey::kStepBody, 0, 0}),
            "F3");
  EXPECT_EQ(to_string(TaskKey{Phase::kBackward, 2, 17, 1, 0}), "B2:m17.1");
  EXPECT_EQ(to_string(TaskKey{Phase::kForward, 0, 5, 0, 2}), "F0:m5/2");
}

}  // namespace
}  // namespace smp::schedule
