#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/schedule/task.h"

namespace smp::schedule {

/// One list per rank.
using Schedule = std::vector<ActionList>;

/// Returns `"F3"`, with the chunk if it is not the first: `"B3.1"`.
std::string to_string(const Action& action);
/// Returns a text like `"F0 F1 B0"`.
std::string to_string(const ActionList& actions);
/// Returns a line like `"2: F0 F1 B0"` per rank, each ended by a newline.
std::string to_string(const Schedule& schedule);

/// Reads actions that are separated by blanks.
/// @throws ValueError with the column
ActionList parse_actions(const std::string& text);

/// Reads lines `"<rank>: <actions>"`, ranks counted from 0 without gaps. Empty
/// lines and text after a `#` do not matter.
/// @throws ValueError with line and column
Schedule parse_schedule(const std::string& text);

/// Reduces the tasks that a server runs to actions, so that what was planned
/// and what was executed can be compared. Tasks of one action in a row make one
/// entry. A task that goes on after it was suspended belongs to the entry where
/// it began; a further module of an action that was interrupted by another
/// action makes a further entry, so an interruption shows.
class ExecutedOrder {
 public:
  /// Returns the chunk of a task among the chunks of this rank; nothing if it
  /// belongs to no action and is left out.
  using ChunkOf = std::function<std::optional<int64_t>(const TaskKey&)>;

  explicit ExecutedOrder(ChunkOf chunk_of = {})
      : chunk_of_(std::move(chunk_of)) {}

  /// Notes a task that begins or goes on.
  void add(const TaskKey& key);
  /// Notes an action, for code that knows it.
  /// @param goes_on  whether it goes on after a suspension
  void add(const Action& action, bool goes_on);
  /// Notes an action that will not run: `begun` has it, the text does not.
  void skip(const Action& action);

  /// Returns the entries of the text form.
  const ActionList& entries() const { return entries_; }
  /// Returns each action once: `StepProgress::begun`.
  const ActionList& begun() const { return begun_; }

 private:
  ChunkOf chunk_of_;
  ActionList entries_;
  ActionList begun_;
  std::set<Action> seen_;
};

/// Returns the actions of the tasks that a rank has executed.
/// @param chunk_of_module chunk by module id; bodies (`TaskKey::kStepBody`) are
///     chunk 0 unless the map says otherwise. Lower ids (arithmetic and
///     functions at the home of their tensors) belong to no action.
/// @throws ValueError if a module is missing in the map
ActionList executed_actions(const std::vector<TaskKey>& executed,
                            const std::map<int64_t, int64_t>& chunk_of_module);

}  // namespace smp::schedule
