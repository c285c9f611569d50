#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/kernels/compact_state.h"
#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/launchers.h"
#include "csrc/memory/on_devices.h"
#include "csrc/optim/chunks.h"
#include "csrc/optim/update_list.h"

namespace smp::optim {

namespace {

using kernels::CompactArrays;
using kernels::MomentFormat;

constexpr const char* kCompactAdamOp = "smp::fused_adam_compact_";

// Tensors and numbers that compact arrays have besides those of others.
struct CompactTensors {
  at::TensorList exp_avg_scales;     // float32, one number per block
  at::TensorList exp_avg_sq_scales;  // likewise; both empty without codes
  at::TensorList residues;           // int8, like the parameters; or empty
  at::IntArrayRef begins;            // first elements of the parameters
  at::IntArrayRef seeds;             // empty: values are rounded to nearest
};

void check_number_of(const char* name, size_t size, size_t num_params) {
  TORCH_CHECK_VALUE(size == num_params, rank_prefix(), kCompactAdamOp, ": ",
                    name, " must have one entry per parameter, ", num_params,
                    " of them, got ", size);
}

MomentFormat format_of(c10::ScalarType dtype) {
  if (dtype == at::kFloat) return MomentFormat::kFloat;
  if (dtype == at::kBFloat16) return MomentFormat::kBFloat16;
  TORCH_CHECK_VALUE(dtype == at::kByte, rank_prefix(), kCompactAdamOp,
                    ": exp_avg 0 must be float32, bfloat16 or uint8, got ",
                    dtype);
  return MomentFormat::kInt8;
}

// Checks a tensor that belongs to a parameter and returns it.
const at::Tensor& checked(const char* name, size_t idx,
                          const at::Tensor& tensor, const at::Tensor& param,
                          c10::ScalarType dtype, int64_t numel) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.numel() == numel &&
                        tensor.is_non_overlapping_and_dense() &&
                        tensor.device() == param.device(),
                    rank_prefix(), kCompactAdamOp, ": ", name, " ", idx,
                    " must be ", dtype, " with ", numel,
                    " elements in one piece of memory on ", param.device(),
                    ", got ", tensor.scalar_type(), " with ", tensor.numel(),
                    " on ", tensor.device());
  return tensor;
}

std::vector<CompactArrays> compact_arrays(
    const std::vector<kernels::UpdateArrays>& arrays, at::TensorList params,
    const CompactTensors& tensors, MomentFormat format) {
  const bool has_codes = format == MomentFormat::kInt8;
  const bool has_residues = !tensors.residues.empty();
  const bool is_stochastic = !tensors.seeds.empty();
  const size_t num_scales = has_codes ? params.size() : 0;
  check_number_of("begins", tensors.begins.size(), params.size());
  check_number_of("exp_avg_scales", tensors.exp_avg_scales.size(), num_scales);
  check_number_of("exp_avg_sq_scales", tensors.exp_avg_sq_scales.size(),
                  num_scales);
  if (is_stochastic) {
    check_number_of("seeds", tensors.seeds.size(), params.size());
  }
  if (has_residues) {
    check_number_of("residues", tensors.residues.size(), params.size());
  }
  std::vector<CompactArrays> result(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    CompactArrays& own = result[i];
    own.arrays = arrays[i];
    own.format = format;
    own.first_element = tensors.begins[i];
    own.is_stochastic = is_stochastic;
    if (is_stochastic) own.seed = static_cast<uint64_t>(tensors.seeds[i]);
    TORCH_CHECK_VALUE(own.first_element >= 0, rank_prefix(), kCompactAdamOp,
                      ": begins must be >= 0, got ", own.first_element);
    TORCH_CHECK_VALUE(
        format != MomentFormat::kFloat || param.scalar_type() != at::kFloat,
        rank_prefix(), kCompactAdamOp, ": parameter ", i,
        " and its moments are float32; use smp::fused_adam_");
    if (param.is_meta()) continue;
    const auto scales_of = [&](const char* name, at::TensorList list) {
      return checked(
                 name, i, list[i], param, at::kFloat,
                 kernels::num_moment_blocks(own.first_element, param.numel()))
          .mutable_data_ptr<float>();
    };
    if (has_codes) {
      own.exp_avg_scales = scales_of("exp_avg_scale", tensors.exp_avg_scales);
      own.exp_avg_sq_scales =
          scales_of("exp_avg_sq_scale", tensors.exp_avg_sq_scales);
    }
    if (!has_residues) continue;
    TORCH_CHECK_VALUE(param.scalar_type() == at::kBFloat16, rank_prefix(),
                      kCompactAdamOp, ": parameter ", i,
                      " with a residue must be bfloat16, got ",
                      param.scalar_type());
    own.residue = checked("residue", i, tensors.residues[i], param, at::kChar,
                          param.numel())
                      .mutable_data_ptr<int8_t>();
  }
  return result;
}

// Returns chunks that are cut between blocks.
std::vector<Chunk> chunks_of_blocks(const std::vector<CompactArrays>& arrays) {
  static_assert(kChunkElements % kernels::kMomentBlock == 0);
  std::vector<int64_t> sizes;
  for (const CompactArrays& own : arrays) {
    const int64_t size = own.arrays.num_elements;
    sizes.push_back(size > 0 ? own.offset() + size : 0);
  }
  std::vector<Chunk> chunks = cut(sizes);
  for (Chunk& chunk : chunks) {
    const int64_t offset = arrays[chunk.array_idx].offset();
    chunk.begin = std::max(int64_t{0}, chunk.begin - offset);
    chunk.end -= offset;
  }
  return chunks;
}

void update_on_cpu(const std::vector<CompactArrays>& arrays,
                   const std::vector<kernels::UpdateArrays>& plain,
                   const kernels::AdamOptions& options,
                   const Scalars& scalars) {
  count_steps(plain);
  const auto factors = adam_factors_of(plain, options, scalars.divisor());
  const double rate = scalars.lr();
  for_chunks_backwards(
      chunks_of_blocks(arrays), [&](const Chunk& chunk, size_t) {
        kernels::fused().adam_compact(arrays[chunk.array_idx],
                                      factors[chunk.array_idx], rate,
                                      chunk.begin, chunk.end);
      });
}

void fused_adam_compact_(
    at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs, at::TensorList steps, at::TensorList copies,
    at::TensorList exp_avg_scales, at::TensorList exp_avg_sq_scales,
    at::TensorList residues, at::IntArrayRef begins, at::IntArrayRef seeds,
    const at::Tensor& lr, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool bias_correction,
    const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  check_number_of("grads", grads.size(), params.size());
  check_number_of("exp_avgs", exp_avgs.size(), params.size());
  if (params.empty()) return;
  const c10::ScalarType dtype = exp_avgs[0].scalar_type();
  const MomentFormat format = format_of(dtype);
  const auto plain = update_arrays(
      kCompactAdamOp, {params, grads, exp_avgs, exp_avg_sqs, steps, copies},
      {.moments = dtype});
  const c10::Device device = params[0].device();
  const Scalars scalars(kCompactAdamOp, device, lr, grad_scale, found_inf);
  const kernels::AdamOptions options{beta1,        beta2,     eps,
                                     weight_decay, decoupled, bias_correction};
  const auto arrays = compact_arrays(
      plain, params,
      {exp_avg_scales, exp_avg_sq_scales, residues, begins, seeds}, format);
  if (is_accelerator(device)) {
    memory::run_on_device(kCompactAdamOp, device, [&](void* stream) {
      return kernels::launchers_of(device).adam_compact(
          arrays.data(), static_cast<int64_t>(arrays.size()), options,
          scalars.view(), stream);
    });
  } else if (device.is_cpu() && !scalars.is_skipped()) {
    update_on_cpu(arrays, plain, options, scalars);
  }
  for (at::TensorList list : {params, exp_avgs, exp_avg_sqs, steps, copies,
                              exp_avg_scales, exp_avg_sq_scales, residues}) {
    bump_versions(list);
  }
}

}  // namespace

// fused_adam_compact_: fused_adam_ on moments that are float32, bfloat16, or
// uint8 codes with scales, of parameters that are float32 or bfloat16. The
// latter may have residues, further digits. `begins` are the numbers of the
// first elements in the whole parameters; blocks of codes are counted from the
// begin of these, and so are random numbers.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "fused_adam_compact_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
      "Tensor(e!)[] copies, Tensor(f!)[] exp_avg_scales, "
      "Tensor(g!)[] exp_avg_sq_scales, Tensor(h!)[] residues, int[] begins, "
      "int[] seeds, Tensor lr, float beta1, float beta2, float eps, "
      "float weight_decay, bool decoupled, bool bias_correction, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("fused_adam_compact_", &fused_adam_compact_);
})

}  // namespace smp::optim
