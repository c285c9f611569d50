#pragma once

#include <cstdint>

#include "csrc/schedule/task.h"

// How much of a step is under way on this rank, for policies that let a forward
// wait. Only what comes *earlier* counts against a forward: the earliest
// microbatch then never waits for a limit on any rank, and when it is over the
// next one is the earliest. So such a limit cannot stop a step.

namespace smp::schedule {

/// Whether this rank keeps activations of as many earlier microbatches as 1F1B
/// does: one for each rank from here on, and what `active_microbatches` allows
/// beyond.
bool is_beyond_1f1b(const ReadyTask& forward, const StepProgress& progress);

/// Whether some microbatch is not over and has not begun its backward on this
/// rank. That, or its end, is then certain to come, whether or not weight
/// gradients of this rank are put off. False where the policy is not told what
/// is under way.
bool has_backwards_to_come(const StepProgress& progress);

/// How many (microbatch, chunk) units of this rank that come before this one
/// still have a backward to begin. Units come in groups of `group` microbatches
/// that pass one chunk after the other.
int64_t num_open_units_before(int64_t mb, int64_t chunk, int64_t group,
                              const StepProgress& progress);

}  // namespace smp::schedule
