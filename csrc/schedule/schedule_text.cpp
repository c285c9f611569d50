#include "csrc/schedule/schedule_text.h"

#include <string_view>

#include "csrc/common/check.h"
#include "csrc/schedule/text_reader.h"

namespace smp::schedule {
namespace {

// Reads the actions from here to the end of the line.
ActionList read_actions(TextReader& reader) {
  ActionList actions;
  reader.skip_spaces();
  while (!reader.at_end()) {
    Action action;
    action.phase = reader.phase();
    action.mb = reader.number("the microbatch");
    if (reader.skip('.')) action.chunk = reader.number("the chunk");
    if (!reader.skip_spaces() && !reader.at_end()) {
      reader.fail("a blank after " + to_string(action));
    }
    actions.push_back(action);
  }
  return actions;
}

}  // namespace

std::string to_string(const Action& action) {
  std::string text(1, phase_letter(action.phase));
  text += std::to_string(action.mb);
  if (action.chunk != 0) text += "." + std::to_string(action.chunk);
  return text;
}

std::string to_string(const ActionList& actions) {
  std::string text;
  for (const Action& action : actions) {
    if (!text.empty()) text += ' ';
    text += to_string(action);
  }
  return text;
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (size_t i = 0; i < schedule.size(); ++i) {
    text += std::to_string(i) + ":";
    if (!schedule[i].empty()) text += " " + to_string(schedule[i]);
    text += '\n';
  }
  return text;
}

ActionList parse_actions(const std::string& text) {
  TextReader reader(text, "schedule");
  return read_actions(reader);
}

Schedule parse_schedule(const std::string& text) {
  Schedule schedule;
  std::string_view rest = text;
  for (int line_number = 1; !rest.empty(); ++line_number) {
    const size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    line = line.substr(0, line.find('#'));
    TextReader reader(line, "schedule, line " + std::to_string(line_number));
    reader.skip_spaces();
    if (reader.at_end()) continue;
    const size_t column = reader.column();
    const int64_t rank = reader.number("a rank");
    if (rank != static_cast<int64_t>(schedule.size())) {
      reader.fail_at(column, "expected rank " +
                                 std::to_string(schedule.size()) + ", got " +
                                 std::to_string(rank) +
                                 "; give one line per rank, in order");
    }
    reader.skip_spaces();
    reader.expect(':', "the actions of the rank");
    schedule.push_back(read_actions(reader));
  }
  return schedule;
}

void ExecutedOrder::add(const TaskKey& key) {
  const std::optional<int64_t> chunk = chunk_of_(key);
  if (!chunk) return;
  add({key.phase, key.mb, *chunk}, key.resume > 0);
}

void ExecutedOrder::add(const Action& action, bool goes_on) {
  const bool is_first = seen_.insert(action).second;
  if (is_first) begun_.push_back(action);
  const bool in_a_row = !entries_.empty() && entries_.back() == action;
  if ((is_first || !goes_on) && !in_a_row) entries_.push_back(action);
}

void ExecutedOrder::skip(const Action& action) {
  if (seen_.insert(action).second) begun_.push_back(action);
}

ActionList executed_actions(const std::vector<TaskKey>& executed,
                            const std::map<int64_t, int64_t>& chunk_of_module) {
  ExecutedOrder order([&](const TaskKey& key) -> std::optional<int64_t> {
    const auto it = chunk_of_module.find(key.module_id);
    if (it != chunk_of_module.end()) return it->second;
    if (key.module_id < TaskKey::kStepBody) return std::nullopt;
    SMP_CHECK_VALUE(key.module_id == TaskKey::kStepBody, "task ",
                    to_string(key), " runs module ", key.module_id,
                    ", which has no chunk; name the chunk of every module that "
                    "this rank owns");
    return 0;
  });
  for (const TaskKey& key : executed) order.add(key);
  return order.entries();
}

}  // namespace smp::schedule
