#pragma once

#include "csrc/schedule/simulator.h"

namespace smp::schedule {

/// Equal stages, free links: F = 1, B = 1, W = 1 ms; rank i has the stages
/// i, i + p, ...; each keeps 10 bytes.
inline SimulationInput equal_chain(int num_ranks, int num_microbatches,
                                   int active_microbatches,
                                   int num_chunks = 1) {
  SimulationInput input;
  for (int s = 0; s < num_ranks * num_chunks; ++s) {
    input.stages.push_back({s % num_ranks, 1, 1, 1, 10});
  }
  input.num_microbatches = num_microbatches;
  input.active_microbatches = active_microbatches;
  return input;
}

}  // namespace smp::schedule
