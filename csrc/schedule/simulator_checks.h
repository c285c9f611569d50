#pragma once

#include <cstddef>

#include "csrc/schedule/simulator.h"

namespace smp::schedule {

/// Returns one more than the largest rank of a stage.
/// @throws ValueError if some rank cannot be one of so many stages
size_t num_ranks(const SimulationInput& input);

/// @throws ValueError if costs or counts make no sense, or some of the ranks
///         0 .. num_ranks - 1 have no stage
void check_input(const SimulationInput& input, size_t num_ranks);

/// @throws ValueError unless each list has each forward and backward of its
///         rank's chunks once, and nothing that is not there
void check_lists(const SimulationInput& input, const Schedule& schedule);

}  // namespace smp::schedule
