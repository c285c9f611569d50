#include <ATen/ops/empty.h>
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

constexpr const char* kMoments = "smp::fused_lamb_moments_";
constexpr const char* kApply = "smp::fused_lamb_apply_";

// Adds up the sums of chunks, in order, into [2, arrays].
void add_up(const std::vector<Chunk>& chunks, const std::vector<double>& parts,
            int64_t num_arrays, double* sums) {
  std::fill(sums, sums + 2 * num_arrays, 0.0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    sums[chunks[i].array_idx] += parts[2 * i];
    sums[num_arrays + chunks[i].array_idx] += parts[2 * i + 1];
  }
}

void moments_on_cpu(const std::vector<kernels::UpdateArrays>& arrays,
                    const kernels::AdamOptions& options, const Scalars& scalars,
                    double* sums) {
  const auto num_arrays = static_cast<int64_t>(arrays.size());
  if (scalars.is_skipped()) return add_up({}, {}, num_arrays, sums);
  count_steps(arrays);
  const auto factors = adam_factors_of(arrays, options, scalars.divisor());
  const std::vector<Chunk> chunks = chunks_of(arrays);
  std::vector<double> parts(2 * chunks.size());
  for_chunks(chunks, [&](const Chunk& chunk, size_t idx) {
    kernels::fused().lamb_moments(arrays[chunk.array_idx],
                                  factors[chunk.array_idx], chunk.begin,
                                  chunk.end, &parts[2 * idx]);
  });
  add_up(chunks, parts, num_arrays, sums);
}

at::Tensor fused_lamb_moments_(at::TensorList params, at::TensorList grads,
                               at::TensorList exp_avgs,
                               at::TensorList exp_avg_sqs, at::TensorList steps,
                               double beta1, double beta2, double eps,
                               double weight_decay, bool decoupled,
                               bool bias_correction, bool grad_averaging,
                               const OptionalTensor& grad_scale,
                               const OptionalTensor& found_inf) {
  TORCH_CHECK_VALUE(!params.empty() && grads.size() == params.size(),
                    rank_prefix(), kMoments,
                    " takes parameters and one gradient for each, got ",
                    params.size(), " and ", grads.size());
  const auto arrays = update_arrays(
      kMoments, {params, grads, exp_avgs, exp_avg_sqs, steps, {}});
  const auto num_arrays = static_cast<int64_t>(arrays.size());
  const c10::Device device = params[0].device();
  const Scalars scalars(kMoments, device, {}, grad_scale, found_inf);
  const kernels::AdamOptions options{beta1,         beta2,     eps,
                                     weight_decay,  decoupled, bias_correction,
                                     grad_averaging};
  const auto in_double = params[0].options().dtype(at::kDouble);
  const at::Tensor sums = at::empty({2, num_arrays}, in_double);
  if (is_accelerator(device)) {
    const at::Tensor partial_sums =
        at::empty({kernels::launchers_of(device).num_lamb_partial_sums(
                      arrays.data(), num_arrays)},
                  in_double);
    memory::run_on_device(kMoments, device, [&](void* stream) {
      return kernels::launchers_of(device).lamb_moments(
          arrays.data(), num_arrays, options, scalars.view(),
          partial_sums.mutable_data_ptr<double>(),
          sums.mutable_data_ptr<double>(), stream);
    });
  } else if (device.is_cpu()) {
    moments_on_cpu(arrays, options, scalars, sums.mutable_data_ptr<double>());
  }
  for (at::TensorList list : {exp_avgs, exp_avg_sqs, steps}) {
    bump_versions(list);
  }
  return sums;
}

void fused_lamb_apply_(at::TensorList params, at::TensorList exp_avgs,
                       at::TensorList exp_avg_sqs, at::TensorList steps,
                       at::TensorList copies, const at::Tensor& sums,
                       const at::Tensor& lr, double beta1, double beta2,
                       double eps, double weight_decay, bool decoupled,
                       bool bias_correction, bool always_has_ratio,
                       const OptionalTensor& found_inf) {
  if (params.empty()) return;
  const auto arrays =
      update_arrays(kApply, {params, {}, exp_avgs, exp_avg_sqs, steps, copies});
  const auto num_arrays = static_cast<int64_t>(arrays.size());
  const c10::Device device = params[0].device();
  TORCH_CHECK_VALUE(sums.scalar_type() == at::kDouble &&
                        sums.sizes() == c10::IntArrayRef({2, num_arrays}) &&
                        sums.device() == device && sums.is_contiguous(),
                    rank_prefix(), kApply,
                    ": sums must be a contiguous float64 tensor with sizes "
                    "[2, ",
                    num_arrays, "] on ", device, ", got sizes ", sums.sizes(),
                    " of ", sums.scalar_type(), " on ", sums.device());
  const Scalars scalars(kApply, device, lr, {}, found_inf);
  const kernels::LambOptions options = {
      {beta1, beta2, eps, weight_decay, decoupled, bias_correction},
      always_has_ratio};
  if (is_accelerator(device)) {
    memory::run_on_device(kApply, device, [&](void* stream) {
      return kernels::launchers_of(device).lamb_apply(
          arrays.data(), num_arrays, options, scalars.view(),
          sums.const_data_ptr<double>(), stream);
    });
  } else if (device.is_cpu() && !scalars.is_skipped()) {
    const auto factors = adam_factors_of(arrays, options.adam, 1);
    const double* squares = sums.const_data_ptr<double>();
    const double rate = scalars.lr();
    for_chunks_backwards(chunks_of(arrays), [&](const Chunk& chunk, size_t) {
      const int64_t i = chunk.array_idx;
      const double ratio =
          kernels::trust_ratio(options, squares[i], squares[num_arrays + i]);
      kernels::fused().lamb_apply(arrays[i], factors[i], rate * ratio,
                                  chunk.begin, chunk.end);
    });
  }
  bump_versions(params);
  bump_versions(copies);
}

}  // namespace

// LAMB in two phases, because the length of a step depends on all elements of
// a parameter. fused_lamb_moments_ moves the moments, counts the steps and
// gives the sums of squares of parameters and of their updates, float64
// [2, parameters]. fused_lamb_apply_ takes such sums, of all parts of the
// parameters, and updates parameters and 16-bit copies.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "fused_lamb_moments_(Tensor[] params, Tensor[] grads, "
      "Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, Tensor(c!)[] steps, "
      "float beta1, float beta2, float eps, float weight_decay, "
      "bool decoupled, bool bias_correction, bool grad_averaging, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> Tensor");
  m.def(
      "fused_lamb_apply_(Tensor(a!)[] params, Tensor[] exp_avgs, "
      "Tensor[] exp_avg_sqs, Tensor[] steps, Tensor(b!)[] copies, "
      "Tensor sums, Tensor lr, float beta1, float beta2, float eps, "
      "float weight_decay, bool decoupled, bool bias_correction, "
      "bool always_has_ratio, Tensor? found_inf=None) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("fused_lamb_moments_", &fused_lamb_moments_);
  m.impl("fused_lamb_apply_", &fused_lamb_apply_);
})

}  // namespace smp::optim
