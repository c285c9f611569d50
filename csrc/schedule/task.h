#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace smp::schedule {

/// `kBackward` is the whole backward, or its input-gradient part where a task
/// `kWeight` for the same microbatch follows.
enum class Phase : int64_t { kForward = 0, kBackward = 1, kWeight = 2 };

/// Names one turn of work. Equal on all data-parallel peers of a rank, whatever
/// the order of arrival: it is what `deterministic_server` agrees on.
struct TaskKey {
  Phase phase = Phase::kForward;
  int64_t mb = 0;
  int64_t module_id = kStepBody;
  int64_t visit = 0;   ///< how often (phase, mb, module) came before
  int64_t resume = 0;  ///< how often this task was suspended before

  static constexpr int64_t kStepBody = -1;

  auto operator<=>(const TaskKey&) const = default;
};

/// Returns `"F3"` for the body of microbatch 3, `"B3:m17.1"` for the second
/// backward of module 17; `"/2"` is appended at the second resumption.
std::string to_string(const TaskKey& key);

/// Reads the text of `to_string(TaskKey)`. @throws ValueError with the position
TaskKey parse_task_key(const std::string& text);

/// The work of a rank for one microbatch and one of its chunks: the unit of
/// plans and of the compact text form. A chunk is a part of the model that runs
/// as a whole; with virtual stages a rank has several.
struct Action {
  Phase phase = Phase::kForward;
  int64_t mb = 0;
  int64_t chunk = 0;

  auto operator<=>(const Action&) const = default;
};

/// Actions of one rank, in order.
using ActionList = std::vector<Action>;

/// A task that could run now.
struct ReadyTask {
  TaskKey key;
  int64_t arrival = 0;  ///< order in which tasks became ready on this rank
  bool not_started = false;
  int64_t chunk = 0;  ///< of the module, among the chunks of this rank

  Action action() const { return {key.phase, key.mb, chunk}; }
};

/// The state of a step that a policy may use besides the ready tasks. A field
/// that is left at its default switches off what depends on it.
struct StepProgress {
  int num_microbatches = 1;
  /// Number of step bodies that run here for real (driver) and have not yet
  /// reached their backward or end, among those that may start now; 0 on other
  /// ranks.
  int num_forwards_pending = 0;

  int num_partitions = 1;
  int num_chunks = 1;  ///< of this rank
  /// Number of ranks that the data pass before they reach this one.
  int depth = 0;
  /// Number of microbatches that the driver lets in; 0 if not known: then
  /// policies with a name let no forward wait, and do not look at the two lists
  /// below.
  int active_microbatches = 0;
  /// Actions begun on this rank, in order, each once (`ExecutedOrder`); actions
  /// of microbatches that are over may be left out.
  std::span<const Action> begun = {};
  /// Microbatches that are over: no rank keeps anything of them.
  std::span<const int64_t> ended = {};
  /// Microbatches whose backward has begun here, and of which more modules are
  /// to come: they are still kept.
  std::span<const int64_t> going_back = {};
};

}  // namespace smp::schedule
