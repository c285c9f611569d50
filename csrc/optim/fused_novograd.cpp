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

constexpr const char* kFusedNovogradOp = "smp::fused_novograd_";

// Moves the running norm of one parameter and returns the factors of its
// update.
template <typename T>
kernels::MomentumFactors move_norm(const kernels::UpdateArrays& arrays,
                                   const kernels::NovoGradOptions& options,
                                   const Scalars& scalars, double norm) {
  T* running = static_cast<T*>(arrays.exp_avg_sq);
  const double step = *arrays.step;
  *running = static_cast<T>(
      kernels::running_norm(options, step, *running, norm, scalars.divisor()));
  return kernels::novograd_factors(options, step, *running, scalars.lr(),
                                   scalars.divisor());
}

void update_on_cpu(const std::vector<kernels::UpdateArrays>& arrays,
                   const kernels::NovoGradOptions& options,
                   const Scalars& scalars, const double* norms) {
  count_steps(arrays);
  std::vector<kernels::MomentumFactors> factors;
  factors.reserve(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    factors.push_back(
        arrays[i].dtype == kernels::Dtype::kDouble
            ? move_norm<double>(arrays[i], options, scalars, norms[i])
            : move_norm<float>(arrays[i], options, scalars, norms[i]));
  }
  for_chunks_backwards(chunks_of(arrays), [&](const Chunk& chunk, size_t) {
    kernels::fused().momentum(arrays[chunk.array_idx], factors[chunk.array_idx],
                              chunk.begin, chunk.end);
  });
}

void fused_novograd_(at::TensorList params, at::TensorList grads,
                     at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                     at::TensorList steps, at::TensorList copies,
                     const at::Tensor& norms, const at::Tensor& lr,
                     double beta1, double beta2, double eps,
                     double weight_decay, bool reg_inside_moment,
                     bool bias_correction, bool grad_averaging, bool max_norm,
                     bool init_zero, const OptionalTensor& grad_scale,
                     const OptionalTensor& found_inf) {
  TORCH_CHECK_VALUE(grads.size() == params.size(), rank_prefix(),
                    kFusedNovogradOp,
                    ": grads must have one tensor per parameter, ",
                    params.size(), " of them, got ", grads.size());
  if (params.empty()) return;
  const auto arrays = update_arrays(
      kFusedNovogradOp, {params, grads, exp_avgs, exp_avg_sqs, steps, copies},
      {.has_norms = true});
  const auto num_arrays = static_cast<int64_t>(arrays.size());
  const c10::Device device = params[0].device();
  TORCH_CHECK_VALUE(norms.scalar_type() == at::kDouble && norms.dim() == 1 &&
                        norms.numel() == num_arrays &&
                        norms.device() == device && norms.is_contiguous(),
                    rank_prefix(), kFusedNovogradOp,
                    ": norms must be a contiguous float64 tensor with sizes [",
                    num_arrays, "] on ", device, ", got sizes ", norms.sizes(),
                    " of ", norms.scalar_type(), " on ", norms.device());
  const Scalars scalars(kFusedNovogradOp, device, lr, grad_scale, found_inf);
  kernels::NovoGradOptions options;
  options.adam = {
      beta1,           beta2,         eps, weight_decay, !reg_inside_moment,
      bias_correction, grad_averaging};
  options.is_max_norm = max_norm;
  options.starts_at_zero = init_zero;
  if (is_accelerator(device)) {
    memory::run_on_device(kFusedNovogradOp, device, [&](void* stream) {
      return kernels::launchers_of(device).novograd(
          arrays.data(), num_arrays, options, scalars.view(),
          norms.const_data_ptr<double>(), stream);
    });
  } else if (device.is_cpu() && !scalars.is_skipped()) {
    update_on_cpu(arrays, options, scalars, norms.const_data_ptr<double>());
  }
  for (at::TensorList list : {params, exp_avgs, exp_avg_sqs, steps, copies}) {
    bump_versions(list);
  }
}

}  // namespace

// fused_novograd_: one update. `norms`, float64 [parameters], are those of the
// whole gradients as they are, not divided by `grad_scale`; `exp_avg_sqs` are
// their running norms, one number each. For the rest see fused_adam_.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "fused_novograd_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
      "Tensor(e!)[] copies, Tensor norms, Tensor lr, float beta1, "
      "float beta2, float eps, float weight_decay, bool reg_inside_moment, "
      "bool bias_correction, bool grad_averaging, bool max_norm, "
      "bool init_zero, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m, { m.impl("fused_novograd_", &fused_novograd_); })

}  // namespace smp::optim
