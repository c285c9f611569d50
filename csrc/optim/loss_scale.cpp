#include "csrc/kernels/loss_scale.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "csrc/common/check.h"
#include "csrc/kernels/launchers.h"
#include "csrc/memory/on_devices.h"
#include "csrc/optim/ops.h"
#include "csrc/optim/update_list.h"

namespace smp::optim {

namespace {

constexpr const char* kLossScaleOp = "smp::update_loss_scale_";

void check(const at::Tensor& state, const at::Tensor& found_inf) {
  TORCH_CHECK_VALUE(state.scalar_type() == at::kDouble &&
                        state.sizes() == c10::IntArrayRef({4}) &&
                        state.is_contiguous(),
                    rank_prefix(), kLossScaleOp,
                    ": state must be a contiguous float64 tensor with 4 "
                    "elements, got sizes ",
                    state.sizes(), " of ", state.scalar_type());
  TORCH_CHECK_VALUE(found_inf.numel() == 1 && found_inf.is_floating_point(),
                    rank_prefix(), kLossScaleOp,
                    ": found_inf must be one floating point number, got sizes ",
                    found_inf.sizes(), " of ", found_inf.scalar_type());
}

}  // namespace

void update_loss_scale_(const at::Tensor& state, const at::Tensor& found_inf,
                        double factor, int64_t window, double min_scale,
                        int64_t delayed_shift, bool gives_back) {
  check(state, found_inf);
  TORCH_CHECK_VALUE(window > 0, rank_prefix(), kLossScaleOp,
                    ": window must be > 0, got ", window);
  const kernels::LossScaleRule rule = {factor, window, min_scale, delayed_shift,
                                       gives_back};
  const c10::Device device = state.device();
  if (!device.is_meta()) {
    const at::Tensor number = found_inf.to(
        at::TensorOptions().dtype(at::kDouble).device(device), true);
    const double* found = number.const_data_ptr<double>();
    auto* numbers = reinterpret_cast<kernels::LossScaleState*>(
        state.mutable_data_ptr<double>());
    if (is_accelerator(device)) {
      memory::run_on_device(kLossScaleOp, device, [&](void* stream) {
        return kernels::launchers_of(device).move_loss_scale(rule, found,
                                                             numbers, stream);
      });
    } else {
      kernels::move_loss_scale(rule, *found != 0, numbers);
    }
  }
  bump_versions(state);
}

// update_loss_scale_: ends an iteration of the dynamic loss scale; see
// kernels/loss_scale.h. `state`, float64 [4]: scale, iteration, last overflow,
// hysteresis. `found_inf`: not 0 for an overflow. The host does not wait.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "update_loss_scale_(Tensor(a!) state, Tensor found_inf, float factor, "
      "int window, float min_scale, int delayed_shift, bool gives_back) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m,
                        { m.impl("update_loss_scale_", &update_loss_scale_); })

}  // namespace smp::optim
