#include "csrc/pipeline/baton.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace smp::pipeline {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{20};

void take_turn(Baton& baton, Context& context, milliseconds length = {}) {
  baton.give_to(&context);
  std::this_thread::sleep_for(length);
  baton.take_back();
}

TEST(BatonTest, first_turn_of_a_context_is_told_from_those_that_follow) {
  Baton baton(nullptr);
  Context context;
  baton.begin_step(0, 1);
  EXPECT_EQ(baton.holder(), nullptr);
  EXPECT_TRUE(baton.give_to(&context));
  EXPECT_EQ(baton.holder(), &context);
  EXPECT_EQ(context.state, Context::State::kRunning);
  baton.note_wait(context, "an answer", 3);
  EXPECT_EQ(to_string(context), ": waiting for an answer of global_rank 3");
  baton.take_back();
  EXPECT_EQ(baton.holder(), nullptr);
  EXPECT_FALSE(baton.give_to(&context));
  EXPECT_EQ(context.state, Context::State::kRunning);
  EXPECT_EQ(baton.stats().num_switches, 2);
  EXPECT_EQ(baton.stats().num_contexts, 1);
}

TEST(BatonTest, time_of_a_step_is_idle_or_of_a_turn) {
  Baton baton(nullptr);
  Context context;
  const auto began = std::chrono::steady_clock::now();
  baton.begin_step(0, 1);
  std::this_thread::sleep_for(kLong);
  take_turn(baton, context, 2 * kLong);
  take_turn(baton, context);
  const std::chrono::nanoseconds longest = baton.longest_turn();
  EXPECT_GE(longest, 2 * kLong) << "a short turn does not replace a long one";
  std::this_thread::sleep_for(kLong);
  baton.end_step();
  const auto length = std::chrono::steady_clock::now() - began;
  const std::chrono::nanoseconds idle{baton.stats().idle_ns};
  EXPECT_GE(idle, 2 * kLong) << "before the first turn, and after the last";
  EXPECT_LE(idle + longest, length);
}

TEST(BatonTest, timeline_has_turns_and_what_they_waited_for) {
  Timeline timeline;
  timeline.start(16);
  Baton baton(&timeline);
  Context context;
  context.key = {Phase::kForward, 2, 7, 0, 0};
  baton.begin_step(5, 4);
  baton.give_to(&context);
  baton.note_wait(context, "an answer", 3);
  baton.take_back();
  baton.note_answer(context);
  baton.give_to(&context);
  context.key.phase = Phase::kBackward;
  baton.begin_next_task("its turn");
  baton.take_back();
  baton.end_step();
  std::string kinds;
  std::vector<Phase> phases;
  for (const TimelineEvent& event : timeline.take().events) {
    switch (event.kind) {
      case TimelineEvent::Kind::kRun:
        kinds += 'r';
        phases.push_back(event.key.phase);
        break;
      case TimelineEvent::Kind::kWait:
        kinds += 'w';
        EXPECT_STREQ(event.what, "an answer");
        EXPECT_EQ(event.peer, 3);
        EXPECT_EQ(event.key.phase, Phase::kForward);
        EXPECT_EQ(event.key.mb, 2);
        break;
      case TimelineEvent::Kind::kStep:
        kinds += 's';
        EXPECT_EQ(event.step, 5);
        break;
      default:
        break;
    }
  }
  EXPECT_EQ(kinds, "rwrrs");
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::kForward, Phase::kForward,
                                        Phase::kBackward}));
}

}  // namespace
}  // namespace smp::pipeline
