#pragma once

#include <ATen/core/Tensor.h>

namespace smp::tensor_parallel {

/// Returns an argument of a product as `torch.autocast` would cast it: the
/// tensor itself where that is off.
at::Tensor as_autocast(const at::Tensor& tensor);

}  // namespace smp::tensor_parallel
