#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace smp::memory {

/// What one recomputed call of a microbatch keeps: how many of this
/// microbatch came before it on this rank.
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

/// What to do with activations in a step whose tasks are known. Pure.
struct OffloadPlan {
  /// By task; of forwards: its activation is needed so soon that it stays.
  std::vector<bool> stays;
  /// By task: activations whose way back begins with it.
  std::vector<std::vector<ActivationId>> loads;
};

/// @param tasks    of one step on one rank, in order; a backward is behind its
///                 forward, and a forward may have none
/// @param horizon  how many tasks before its backward an activation begins to
///                 come back, at least 1
/// Source: algorithms of the public smp v1 guide (activation offloading).
OffloadPlan plan_offload(const std::vector<ActivationTask>& tasks, int horizon);

/// The order in which activations will be needed, as far as it is the same in
/// all schedules: each microbatch backwards, earlier ones first, the one that
/// is at it now before all others.
/// @param live     activations whose backward has not begun
/// @param current  microbatch whose backward runs
std::vector<ActivationId> expected_order(std::vector<ActivationId> live,
                                         std::optional<int> current);

}  // namespace smp::memory
