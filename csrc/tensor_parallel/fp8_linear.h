#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "csrc/nn/fp8.h"
#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {

/// Returns the recipe of a layer whose parts the ranks of a group have.
nn::Fp8Recipe fp8_recipe(const GroupPtr& group, const std::string& scaling,
                         nn::SplitFeatures split);

/// Returns the product of a linear layer with operands of 8 bits, and the bias
/// added. Collective over the group where factors depend on other ranks.
/// @param x       [..., in]
/// @param weight  [out, in]
/// @param bias    [out]
at::Tensor fp8_linear(const GroupPtr& group, const at::Tensor& x,
                      const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::string& scaling, nn::SplitFeatures split);

}  // namespace smp::tensor_parallel
