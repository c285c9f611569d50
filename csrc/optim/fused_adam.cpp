#include <c10/util/Exception.h>
#include <torch/library.h>

#include "csrc/common/check.h"
#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/launchers.h"
#include "csrc/memory/on_devices.h"
#include "csrc/optim/chunks.h"
#include "csrc/optim/update_list.h"

namespace smp::optim {

namespace {

constexpr const char* kFusedAdamOp = "smp::fused_adam_";

void fused_adam_(at::TensorList params, at::TensorList grads,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList steps, at::TensorList copies,
                 const at::Tensor& lr, double beta1, double beta2, double eps,
                 double weight_decay, bool decoupled, bool bias_correction,
                 const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf) {
  TORCH_CHECK_VALUE(grads.size() == params.size(), rank_prefix(), kFusedAdamOp,
                    ": grads must have one tensor per parameter, ",
                    params.size(), " of them, got ", grads.size());
  if (params.empty()) return;
  const auto arrays = update_arrays(
      kFusedAdamOp, {params, grads, exp_avgs, exp_avg_sqs, steps, copies});
  const c10::Device device = params[0].device();
  const Scalars scalars(kFusedAdamOp, device, lr, grad_scale, found_inf);
  const kernels::AdamOptions options{beta1,        beta2,     eps,
                                     weight_decay, decoupled, bias_correction};
  if (is_accelerator(device)) {
    memory::run_on_device(kFusedAdamOp, device, [&](void* stream) {
      return kernels::launchers_of(device).adam(
          arrays.data(), static_cast<int64_t>(arrays.size()), options,
          scalars.view(), stream);
    });
  } else if (device.is_cpu() && !scalars.is_skipped()) {
    count_steps(arrays);
    const auto factors = adam_factors_of(arrays, options, scalars.divisor());
    const double rate = scalars.lr();
    // A norm of the gradients has often just been taken.
    for_chunks_backwards(chunks_of(arrays), [&](const Chunk& chunk, size_t) {
      kernels::fused().adam(arrays[chunk.array_idx], factors[chunk.array_idx],
                            rate, chunk.begin, chunk.end);
    });
  }
  for (at::TensorList list : {params, exp_avgs, exp_avg_sqs, steps, copies}) {
    bump_versions(list);
  }
}

}  // namespace

// fused_adam_: one update of all parameters, their moments, steps and 16-bit
// copies. Gradients are divided by `grad_scale`; where `found_inf` is not 0
// nothing changes. `steps` are the numbers of updates before this one. Numbers
// that are tensors are read on the device.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "fused_adam_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
      "Tensor(e!)[] copies, Tensor lr, float beta1, float beta2, float eps, "
      "float weight_decay, bool decoupled, bool bias_correction, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m, { m.impl("fused_adam_", &fused_adam_); })

}  // namespace smp::optim
