#include "csrc/pipeline/task_choice.h"

#include <gtest/gtest.h>

#include <memory>

namespace smp::pipeline {
namespace {

// Contexts that are no threads: what is chosen counts as begun.
class TaskChoiceTest : public ::testing::Test {
 protected:
  void begin(const char* policy_name, int num_microbatches, int active,
             OrderRole order = OrderRole::kFree) {
    options.order = order;
    begin_with_bodies(policy_name, num_microbatches, active);
  }

  // The last of two ranks, with a policy that lets forwards wait.
  void begin_behind(int num_microbatches) {
    options.is_driver = false;
    options.lets_wait = true;
    options.num_partitions = 2;
    options.depth = 1;
    contexts.clear();
    begin_with_bodies("interleaved", num_microbatches, 2);
    ASSERT_TRUE(turn());  // bodies
    ASSERT_TRUE(turn());
  }

  void begin_with_bodies(const char* policy_name, int num_microbatches,
                         int active) {
    policy = schedule::make_policy(policy_name);
    options.policy = policy.get();
    options.num_microbatches = num_microbatches;
    options.active_microbatches = active;
    choice.begin_step(options);
    for (int mb = 0; mb < num_microbatches; ++mb) {
      choice.add_body(make(Phase::kForward, mb, TaskKey::kStepBody));
    }
  }

  Context* make(Phase phase, int64_t mb, int64_t module_id) {
    contexts.push_back(std::make_unique<Context>());
    contexts.back()->key = {phase, mb, module_id, 0, 0};
    return contexts.back().get();
  }

  Context* turn() {
    Context* chosen = choice.take_next();
    if (!chosen) return nullptr;
    choice.note_turn(*chosen);
    chosen->state = Context::State::kRunning;
    return chosen;
  }

  // A request that this rank serves in its next turn.
  bool serves(Phase phase, int64_t mb, int64_t module_id) {
    Context* context = make(phase, mb, module_id);
    choice.add_ready(context);
    return turn() == context;
  }

  std::unique_ptr<Policy> policy;
  StepOptions options;
  TaskChoice choice;
  std::vector<std::unique_ptr<Context>> contexts;
};

TEST_F(TaskChoiceTest, bodies_start_in_order_while_there_is_a_place) {
  begin("interleaved", 3, 2);
  Context* first = turn();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->key.mb, 0);
  Context* second = turn();
  ASSERT_TRUE(second);
  EXPECT_EQ(second->key.mb, 1);
  EXPECT_FALSE(turn()) << "two are under way";
  choice.note_end(*first);
  Context* third = turn();
  ASSERT_TRUE(third);
  EXPECT_EQ(third->key.mb, 2);
  EXPECT_EQ(choice.executed().size(), 3u);
}

TEST_F(TaskChoiceTest, nothing_is_chosen_when_all_was_cleared) {
  begin("interleaved", 2, 2);
  choice.add_ready(make(Phase::kBackward, 0, 1));
  choice.clear();
  EXPECT_FALSE(turn());
}

TEST_F(TaskChoiceTest, a_follower_takes_what_was_agreed_for_its_step_only) {
  begin("interleaved", 1, 1, OrderRole::kFollower);
  Context* service = make(Phase::kForward, 0, 3);
  choice.add_ready(service);
  EXPECT_FALSE(turn());
  choice.add_agreed(0, service->key);
  EXPECT_EQ(turn(), service);
  choice.add_agreed(1, {Phase::kForward, 0, TaskKey::kStepBody, 0, 0});
  EXPECT_FALSE(turn());
  EXPECT_FALSE(choice.take_held_back()) << "an agreed order counts";
}

TEST_F(TaskChoiceTest, a_leader_tells_each_choice) {
  std::vector<TaskKey> told;
  choice.set_order_sink(
      [&](int64_t, const TaskKey& key) { told.push_back(key); });
  begin("interleaved", 1, 1, OrderRole::kLeader);
  Context* body = turn();
  ASSERT_TRUE(body);
  EXPECT_EQ(told, std::vector<TaskKey>{body->key});
}

TEST_F(TaskChoiceTest,
       a_backward_begins_at_once_unless_others_wait_for_a_turn) {
  static const char* const kTurn = "its turn";
  begin("interleaved", 2, 2);
  Context* body = turn();
  ASSERT_TRUE(body);
  body->key.phase = Phase::kBackward;
  EXPECT_TRUE(choice.may_begin_backward(kTurn));
  Context* other = make(Phase::kBackward, 1, TaskKey::kStepBody);
  other->waits_for = kTurn;
  choice.add_ready(other);
  EXPECT_FALSE(choice.may_begin_backward(kTurn));
}

TEST_F(TaskChoiceTest, a_forward_waits_for_all_of_the_backward_before_it) {
  begin_behind(2);
  ASSERT_TRUE(serves(Phase::kForward, 0, 1));
  ASSERT_TRUE(serves(Phase::kForward, 0, 2));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 2));
  // The choice has not been told yet that there is another module.
  ASSERT_TRUE(serves(Phase::kForward, 1, 1));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 1));
  choice.end_backward(0);

  begin_behind(2);
  ASSERT_TRUE(serves(Phase::kForward, 0, 1));
  ASSERT_TRUE(serves(Phase::kForward, 0, 2));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 2));
  EXPECT_FALSE(serves(Phase::kForward, 1, 1));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 1));
  EXPECT_EQ(turn()->key, (TaskKey{Phase::kForward, 1, 1, 0, 0}));
}

TEST_F(TaskChoiceTest, a_backward_with_fewer_modules_ends_with_its_microbatch) {
  begin_behind(3);
  ASSERT_TRUE(serves(Phase::kForward, 0, 1));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 1));
  ASSERT_TRUE(serves(Phase::kBackward, 0, 2));
  choice.end_backward(0);
  ASSERT_TRUE(serves(Phase::kForward, 1, 1));
  ASSERT_TRUE(serves(Phase::kBackward, 1, 1));
  EXPECT_FALSE(serves(Phase::kForward, 2, 1));
  choice.end_backward(1);
  EXPECT_EQ(turn()->key, (TaskKey{Phase::kForward, 2, 1, 0, 0}));
}

}  // namespace
}  // namespace smp::pipeline
