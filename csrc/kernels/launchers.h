#pragma once

#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/elementwise.h"
#include "csrc/kernels/loss_scale.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/optimizers.h"
#include "csrc/kernels/softmax.h"

namespace smp::kernels {

/// The functions by which one type of device launches kernels; by default those
/// of CUDA, which document them. They copy their arguments before they return.
struct Launchers {
#define SMP_LAUNCHER(name) decltype(&cuda::name) name = &cuda::name
  SMP_LAUNCHER(column_partial_rows);
  SMP_LAUNCHER(bias_gelu_forward);
  SMP_LAUNCHER(bias_gelu_backward);
  SMP_LAUNCHER(bias_dropout_residual_forward);
  SMP_LAUNCHER(bias_dropout_residual_backward);
  SMP_LAUNCHER(rotary);
  SMP_LAUNCHER(norm_forward);
  SMP_LAUNCHER(norm_partial_rows);
  SMP_LAUNCHER(norm_backward);
  SMP_LAUNCHER(softmax_forward);
  SMP_LAUNCHER(softmax_backward);
  SMP_LAUNCHER(cross_entropy_forward);
  SMP_LAUNCHER(cross_entropy_backward);
  SMP_LAUNCHER(num_partials);
  SMP_LAUNCHER(sums_of_squares);
  SMP_LAUNCHER(max_abs);
  SMP_LAUNCHER(scale);
  SMP_LAUNCHER(adam);
  SMP_LAUNCHER(adam_compact);
  SMP_LAUNCHER(num_lamb_partial_sums);
  SMP_LAUNCHER(lamb_moments);
  SMP_LAUNCHER(lamb_apply);
  SMP_LAUNCHER(novograd);
  SMP_LAUNCHER(move_loss_scale);
#undef SMP_LAUNCHER
};

/// Returns the launchers for a type of device, a `c10::DeviceType` as a number.
/// @throws std::runtime_error when it has none
const Launchers& launchers_of_type(int device_type);
/// Sets the launchers of a type of device, for devices of tests, before the
/// first operator; `launchers` outlive the process.
__attribute__((visibility("default"))) void set_launchers(
    int device_type, const Launchers* launchers);

/// @param device  a `c10::Device`
template <typename Device>
const Launchers& launchers_of(const Device& device) {
  return launchers_of_type(static_cast<int>(device.type()));
}

}  // namespace smp::kernels
