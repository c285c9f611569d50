#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace smp::schedule {

enum class Phase : int64_t { kForward = 0, kBackward = 1 };

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

/// `"F3"` for the body of microbatch 3, `"B3:m17.1"` for the second backward of
/// module 17; `"/2"` is appended at the second resumption.
std::string to_string(const TaskKey& key);

/// A task that could run now.
struct ReadyTask {
  TaskKey key;
  int64_t arrival = 0;  ///< order in which tasks became ready on this rank
  bool not_started = false;
};

/// What a policy may know of the step besides the ready tasks.
struct StepProgress {
  int num_microbatches = 1;
  /// Step bodies that run here for real (driver) and have not yet reached
  /// their backward or end, among those that may start now; 0 on other ranks.
  int num_forwards_pending = 0;
};

}  // namespace smp::schedule
