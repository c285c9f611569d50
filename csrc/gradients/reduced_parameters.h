#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "csrc/gradients/parameter_record.h"
#include "csrc/gradients/reducer_options.h"

namespace smp::gradients {

/// The leaves that a reducer serves; see `Reducer`.
struct ReducedParameters {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> targets;
  std::vector<ParameterRecord> records;

  at::Device device() const {
    return params.empty() ? at::Device(at::kCPU) : params.front().device();
  }
};

/// @throws ValueError when the parts do not fit each other or the options
void check_parameters(const ReducedParameters& parameters,
                      const ReducerOptions& options);

}  // namespace smp::gradients
