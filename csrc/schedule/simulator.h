#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"

namespace smp::schedule {

/// A stage of the chain that a microbatch passes forward and back. A rank may
/// have several: its chunks, counted in the order of the chain. (A loss on the
/// driver is a last stage on the rank of the first.)
struct StageCost {
  int rank = 0;
  double forward_ms = 0;
  /// The whole backward, or its input-gradient part if `weight_ms` is not 0.
  double backward_ms = 0;
  double weight_ms = 0;
  /// Bytes kept per microbatch from the beginning of the forward to the end of
  /// the backward (of the weight gradients, if they are a task of their own).
  int64_t activation_bytes = 0;
};

/// The transfer between a stage and the next. Bytes of one ordered pair of
/// ranks pass one after the other; between stages of one rank nothing is sent.
struct BoundaryCost {
  double latency_ms = 0;
  double ms_per_byte = 0;
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

struct SimulationInput {
  std::vector<StageCost> stages;
  std::vector<BoundaryCost> boundaries;  ///< stages - 1, or none: all free
  int num_microbatches = 1;
  /// Microbatches in flight at once; 0 asks the policy of the driver, which is
  /// the rank of the first stage. One is over when its backward has left the
  /// first stage.
  int active_microbatches = 0;
};

struct TimelineEntry {
  int rank = 0;
  int stage = 0;
  Action action;
  double start_ms = 0;
  double end_ms = 0;
};

struct RankUsage {
  double busy_ms = 0;
  double bubble_ms = 0;          ///< makespan less busy
  int64_t peak_activations = 0;  ///< microbatches times stages
  int64_t peak_activation_bytes = 0;
};

struct SimulationResult {
  double makespan_ms = 0;
  std::vector<RankUsage> ranks;
  Schedule executed;
  std::vector<TimelineEntry> timeline;  ///< by start, then rank
};

/// Runs a step without processes. As in the server, a task is ready when its
/// data are there, a rank runs one task at a time, and its policy picks among
/// the ready tasks. Deterministic; times are kept in whole nanoseconds.
/// @param policies one per rank; ranks are counted from 0 without gaps
/// @throws ValueError for costs that make no sense
/// @throws Error if the step cannot finish: names what each rank waits for
SimulationResult simulate(const SimulationInput& input,
                          const std::vector<const Policy*>& policies);

/// Runs a step with the same policy on all ranks, by name.
SimulationResult simulate(const SimulationInput& input,
                          const std::string& policy_name);

/// Returns the actions of each rank under the policy if all stages, forwards,
/// backwards and weight gradients take the same time, and transfers none. Ranks
/// have every `num_partitions`-th stage of the chain.
Schedule executed_by_equal_stages(const Policy& policy,
                                  const PipelineSize& size,
                                  int active_microbatches);

/// Runs a step in which each rank runs its list.
/// @throws ValueError also if a list lacks an action or names one too many
SimulationResult simulate_lists(const SimulationInput& input,
                                const Schedule& schedule);

}  // namespace smp::schedule
