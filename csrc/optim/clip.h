#pragma once

namespace smp::optim {

/// What gradients are multiplied by so that their norm is at most `max_norm`:
/// `min(1, max_norm / (total_norm + 1e-6))`, as in PyTorch. A norm that is not
/// a number gives NaN, so that the loss scaler or the user sees it.
/// @throws ValueError if `max_norm` is negative or not a number
double clip_coefficient(double total_norm, double max_norm);

}  // namespace smp::optim
