#pragma once

#include <cstdint>

#include "csrc/schedule/task.h"

// Limits on the work of a step that is under way on this rank, for policies
// that let a forward wait. Only *earlier* work counts against a forward: the
// earliest microbatch then never waits for a limit on any rank, and when it is
// over the next one is the earliest. So such a limit cannot stop a step.

namespace smp::schedule {

/// Returns whether this rank keeps activations of as many earlier microbatches
/// as 1F1B does: one for each rank from here on, plus the number that
/// `active_microbatches` allows beyond.
bool is_beyond_1f1b(const ReadyTask& forward, const StepProgress& progress);

/// Returns whether some microbatch is not over and has not begun its backward
/// on this rank. Its backward, or its end, is then certain to come, whether or
/// not weight gradients of this rank are put off. False where the policy does
/// not see what is under way.
bool has_backwards_to_come(const StepProgress& progress);

/// Returns the number of earlier (microbatch, chunk) units of this rank that
/// still have a backward to begin. Units come in groups of `group` microbatches
/// that pass one chunk after the other.
int64_t num_open_units_before(int64_t mb, int64_t chunk, int64_t group,
                              const StepProgress& progress);

}  // namespace smp::schedule
