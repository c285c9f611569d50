#pragma once

#include <algorithm>
#include <utility>

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

/// GPipe in closed form.
inline Schedule plan_fill_drain(int num_ranks, int num_microbatches) {
  ActionList actions;
  for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
    for (int mb = 0; mb < num_microbatches; ++mb)
      actions.push_back({phase, mb});
  }
  return Schedule(static_cast<size_t>(num_ranks), actions);
}

/// 1F1B in closed form: a rank starts as many forwards as there are ranks
/// behind it, then one forward and one backward in turn.
inline Schedule plan_1f1b(int num_ranks, int num_microbatches) {
  Schedule schedule;
  for (int i = 0; i < num_ranks; ++i) {
    ActionList actions;
    const int num_warmup = std::min(num_microbatches, num_ranks - 1 - i);
    int f = 0;
    int b = 0;
    while (f < num_warmup) actions.push_back({Phase::kForward, f++});
    while (f < num_microbatches) {
      actions.push_back({Phase::kForward, f++});
      actions.push_back({Phase::kBackward, b++});
    }
    while (b < num_microbatches) actions.push_back({Phase::kBackward, b++});
    schedule.push_back(std::move(actions));
  }
  return schedule;
}

}  // namespace smp::schedule
