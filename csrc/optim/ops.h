#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace smp::optim {

// torch.ops.smp.<name>; see the schemas in ops.cpp and loss_scale.cpp.

at::Tensor sums_of_squares(at::TensorList tensors);
at::Tensor sum_of_squares(at::TensorList tensors);
at::Tensor max_abs(at::TensorList tensors);
at::Tensor found_nonfinite(at::TensorList tensors);
void scale_(at::TensorList tensors, const at::Tensor& factor);
std::tuple<at::Tensor, at::Tensor, at::Tensor> clip_divisor(
    const at::Tensor& sum_of_squares, double max_norm,
    const std::optional<at::Tensor>& grad_scale, double eps);
void update_loss_scale_(const at::Tensor& state, const at::Tensor& found_inf,
                        double factor, int64_t window, double min_scale,
                        int64_t delayed_shift, bool gives_back);

}  // namespace smp::optim
