#pragma once

#include <cstdint>

#include "csrc/kernels/counter_hash.h"

// The dynamic loss scale of fp16 training. Also read by the CUDA compiler.

namespace smp::kernels {

struct LossScaleRule {
  double factor = 2;          // by which the scale changes
  int64_t window = 1000;      // iterations without overflow until it is raised
  double min_scale = 1;       // not lowered below this
  int64_t delayed_shift = 1;  // overflows that are borne until it is lowered
  bool gives_back = false;    // an iteration without overflow forgives them
};

/// Four numbers behind each other; counts are exact up to 2^53.
struct LossScaleState {
  double scale;
  double iteration;      // number of the one that ends now
  double last_overflow;  // an iteration, or -1
  double hysteresis;  // overflows that are borne yet, and the one that counts
};
static_assert(sizeof(LossScaleState) == 4 * sizeof(double), "has no gaps");

/// Ends an iteration.
/// Source: DeepSpeed `deepspeed/runtime/fp16/loss_scaler.py`, the classic rule.
SMP_HOST_DEVICE SMP_INLINED void move_loss_scale(const LossScaleRule& rule,
                                                 bool overflow,
                                                 LossScaleState* state) {
  const auto shift = static_cast<double>(rule.delayed_shift);
  if (overflow) {
    if (state->hysteresis <= 1) {
      const double lower = state->scale / rule.factor;
      state->scale = lower > rule.min_scale ? lower : rule.min_scale;
    } else {
      state->hysteresis -= 1;
    }
    state->last_overflow = state->iteration;
  } else {
    if (rule.gives_back) state->hysteresis = shift;
    const auto num_clean =
        static_cast<int64_t>(state->iteration - state->last_overflow) - 1;
    if (num_clean > 0 && num_clean % rule.window == 0) {
      state->hysteresis = shift;
      state->scale *= rule.factor;
    }
  }
  state->iteration += 1;
}

namespace cuda {

/// Ends an iteration likewise, queued on `stream`; returns nullptr, or the text
/// of the error.
/// @param found_inf  device memory, one number: not 0 for an overflow
/// @param state  device memory
const char* move_loss_scale(const LossScaleRule& rule, const double* found_inf,
                            LossScaleState* state, void* stream);

}  // namespace cuda

}  // namespace smp::kernels
