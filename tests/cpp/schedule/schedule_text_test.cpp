#include "csrc/schedule/schedule_text.h"

#include <gtest/gtest.h>

#include <random>

#include "csrc/common/check.h"

namespace smp::schedule {
namespace {

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const ValueError& e) {
    return e.what();
  }
  return "no error";
}

TaskKey key(const char* text) { return parse_task_key(text); }

TEST(ScheduleText, names_phase_microbatch_and_a_chunk_that_is_not_the_first) {
  const ActionList actions = {{Phase::kForward, 0, 0},
                              {Phase::kForward, 12, 1},
                              {Phase::kBackward, 0, 1},
                              {Phase::kWeight, 0, 0}};
  EXPECT_EQ(to_string(actions), "F0 F12.1 B0.1 W0");
  EXPECT_EQ(parse_actions("F0 F12.1 B0.1 W0"), actions);
  EXPECT_EQ(parse_actions("  F0.0\tF12.1 B0.1   W0 "), actions);
  EXPECT_EQ(to_string(Schedule{actions, {}}), "0: F0 F12.1 B0.1 W0\n1:\n");
}

TEST(ScheduleText, comments_and_empty_lines_do_not_matter) {
  const Schedule expected = {parse_actions("F0 B0"), {}};
  EXPECT_EQ(parse_schedule("# two ranks\n\n 0 : F0 B0  # all\r\n1:"), expected);
  EXPECT_EQ(parse_schedule(""), Schedule{});
}

TEST(ScheduleText, errors_say_line_column_and_what_was_expected) {
  EXPECT_EQ(error_of([] { parse_actions("F0 X1"); }),
            "schedule, column 4: expected F (forward), B (backward) or W "
            "(weight gradients), got 'X1' in 'F0 X1'");
  EXPECT_EQ(error_of([] { parse_actions("F0 B"); }),
            "schedule, column 5: expected the number of the microbatch, the "
            "text ends in 'F0 B'");
  EXPECT_EQ(error_of([] { parse_actions("F0. B1"); }),
            "schedule, column 4: expected the number of the chunk, got ' B1' "
            "in 'F0. B1'");
  EXPECT_EQ(error_of([] { parse_actions("F0B1"); }),
            "schedule, column 3: expected a blank after F0, got 'B1' in "
            "'F0B1'");
  EXPECT_EQ(error_of([] { parse_actions("F99999999999999999999"); }),
            "schedule, column 2: the number of the microbatch does not fit "
            "into 64 bits in 'F99999999999999999999'");
  EXPECT_EQ(error_of([] { parse_schedule("0: F0\n2: F0\n"); }),
            "schedule, line 2, column 1: expected rank 1, got 2; give one line "
            "per rank, in order in '2: F0'");
  EXPECT_EQ(error_of([] { parse_schedule("0 F0\n"); }),
            "schedule, line 1, column 3: expected ':' and the actions of the "
            "rank, got 'F0' in '0 F0'");
}

TEST(ScheduleText, random_schedules_survive_the_round_trip) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    Schedule schedule(random() % 5);
    for (ActionList& actions : schedule) {
      actions.resize(random() % 12);
      for (Action& action : actions) {
        action = {static_cast<Phase>(random() % 3),
                  static_cast<int64_t>(random() % 1000),
                  static_cast<int64_t>(random() % 3)};
      }
    }
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
  }
}

TEST(ScheduleText, damaged_text_is_refused_or_read_but_never_misread) {
  std::mt19937 random(12);
  const std::string letters = "FBW0129 .:#\n\tx";
  int num_refused = 0;
  int num_read = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = "0: F0 F1.1 B0 W0\n1: F0 B0\n";
    for (unsigned i = 0; i <= random() % 3; ++i) {
      text[random() % text.size()] = letters[random() % letters.size()];
    }
    try {
      const Schedule schedule = parse_schedule(text);
      EXPECT_EQ(parse_schedule(to_string(schedule)), schedule) << text;
      ++num_read;
    } catch (const ValueError& e) {
      EXPECT_NE(std::string(e.what()).find("column "), std::string::npos);
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 500);
  EXPECT_GT(num_read, 300);
}

TEST(TaskText, round_trip_and_errors) {
  for (const char* text : {"F3", "B2:m17.1", "W0:m5/2", "F0:m0.3/4", "B1/1"}) {
    EXPECT_EQ(to_string(key(text)), text);
  }
  EXPECT_EQ(error_of([] { key("F0:5"); }),
            "task, column 4: expected 'm' and the module, as in F0:m5, got '5' "
            "in 'F0:5'");
  EXPECT_EQ(error_of([] { key("F0 "); }),
            "task, column 3: expected the end, got ' ' in 'F0 '");
}

TEST(ExecutedActions, modules_of_one_chunk_in_a_row_are_one_action) {
  const std::map<int64_t, int64_t> chunks = {{3, 0}, {4, 0}, {9, 1}};
  EXPECT_EQ(to_string(executed_actions(
                {key("F0:m3"), key("F0:m4"), key("F0:m4.1"), key("F0:m9"),
                 key("F1:m3"), key("B0:m9"), key("B0:m4"), key("B0:m3")},
                chunks)),
            "F0 F0.1 F1 B0.1 B0");
}

TEST(ExecutedActions, going_on_after_a_wait_is_no_further_action) {
  const std::map<int64_t, int64_t> chunks = {{3, 0}};
  // The driver: bodies wait for other ranks in forward and in backward.
  EXPECT_EQ(to_string(executed_actions(
                {key("F0"), key("F1"), key("F0/1"), key("B0/2"), key("F1/1"),
                 key("B1/2"), key("B0/3"), key("B1/3")},
                chunks)),
            "F0 F1 B0 B1");
}

TEST(ExecutedActions, an_interruption_by_another_microbatch_shows) {
  const std::map<int64_t, int64_t> chunks = {{3, 0}, {4, 0}};
  ExecutedOrder order([&](const TaskKey& task) -> std::optional<int64_t> {
    return chunks.at(task.module_id);
  });
  for (const char* text : {"F0:m3", "F1:m3", "F0:m4", "F1:m4"}) {
    order.add(key(text));
  }
  EXPECT_EQ(to_string(order.entries()), "F0 F1 F0 F1");
  EXPECT_EQ(to_string(order.begun()), "F0 F1");
}

TEST(ExecutedActions, a_module_without_chunk_is_refused_or_left_out) {
  EXPECT_EQ(error_of([] { executed_actions({key("F0:m8")}, {{3, 0}}); }),
            "task F0:m8 runs module 8, which has no chunk; name the chunk of "
            "every module that this rank owns");
  ExecutedOrder order([](const TaskKey& task) -> std::optional<int64_t> {
    if (task.module_id == 8) return std::nullopt;
    return 0;
  });
  order.add(key("F0:m8"));
  order.add(key("F0:m3"));
  EXPECT_EQ(to_string(order.entries()), "F0");
}

}  // namespace
}  // namespace smp::schedule
