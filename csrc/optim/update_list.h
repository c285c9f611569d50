#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "csrc/kernels/optimizers.h"

// Checks, pointers and numbers of a call that the fused updates share.

namespace smp::optim {

using OptionalTensor = std::optional<at::Tensor>;

/// The lists that an update works on: one tensor per parameter in each.
struct UpdateTensors {
  at::TensorList params;       // see UpdateKinds
  at::TensorList grads;        // of that dtype or 16 bit; empty: not read
  at::TensorList exp_avgs;     // in the layout of the parameters
  at::TensorList exp_avg_sqs;  // likewise, or one number each
  at::TensorList steps;        // one float32 number each
  at::TensorList copies;       // 16 bit; empty: none
};

/// The dtypes that an update takes.
struct UpdateKinds {
  bool has_norms = false;  // `exp_avg_sqs` have one number each
  /// Dtype of the moments; none: that of the parameter, float32 or float64.
  /// With one, parameters are float32 or bfloat16.
  std::optional<c10::ScalarType> moments = std::nullopt;
};

/// Returns pointers for the kernels.
/// @throws ValueError unless all of a parameter's tensors fit it
std::vector<kernels::UpdateArrays> update_arrays(const char* op,
                                                 const UpdateTensors& tensors,
                                                 const UpdateKinds& kinds = {});

/// Numbers of a call, moved to the device of the parameters.
class Scalars {
 public:
  /// @param lr  undefined: not used
  Scalars(const char* op, c10::Device device, const at::Tensor& lr,
          const OptionalTensor& grad_scale, const OptionalTensor& found_inf);

  kernels::UpdateScalars view() const;

  // Numbers for tensors on the CPU.
  double lr() const;
  double divisor() const;
  bool is_skipped() const;

 private:
  at::Tensor lr_;
  at::Tensor divisor_;
  at::Tensor found_inf_;
};

/// Counts the update of each array and returns its factors, on the CPU.
void count_steps(const std::vector<kernels::UpdateArrays>& arrays);
std::vector<kernels::AdamFactors> adam_factors_of(
    const std::vector<kernels::UpdateArrays>& arrays,
    const kernels::AdamOptions& options, double divisor);

/// Tells autograd that the tensors were written to.
void bump_versions(at::TensorList tensors);

}  // namespace smp::optim
