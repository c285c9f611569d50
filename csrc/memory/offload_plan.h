#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace smp::memory {

/// The name of the activations that one recomputed call of a microbatch keeps:
/// `idx` counts the earlier calls of this microbatch on this rank.
struct ActivationId {
  int mb = -1;
  int idx = 0;

  auto operator<=>(const ActivationId&) const = default;
};

/// The forward or the backward of one recomputed call.
struct ActivationTask {
  bool is_backward = false;
  ActivationId id;

  bool operator==(const ActivationTask&) const = default;
};

/// A plan for the activations of a step whose tasks are known. Pure.
struct OffloadPlan {
  /// Set by task, for a forward whose activation is needed so soon that it
  /// stays.
  std::vector<bool> stays;
  /// Activations by task with which their way back begins.
  std::vector<std::vector<ActivationId>> loads;
};

/// Plans which activations stay and when the others come back.
/// @param tasks    tasks of one step on one rank, in order; a backward comes
///                 after its forward, and a forward may have no backward
/// @param horizon  number of tasks before its backward at which an activation
///                 begins to come back, at least 1
/// Source: algorithms of the public smp v1 guide (activation offloading).
OffloadPlan plan_offload(const std::vector<ActivationTask>& tasks, int horizon);

/// Returns the order in which activations will be needed, as far as it is the
/// same in all schedules: each microbatch backwards, earlier ones first, the
/// current one before all others.
/// @param live     activations whose backward has not begun
/// @param current  microbatch whose backward runs
std::vector<ActivationId> expected_order(std::vector<ActivationId> live,
                                         std::optional<int> current);

}  // namespace smp::memory
