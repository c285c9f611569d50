#include "csrc/optim/ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "csrc/common/check.h"
#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/launchers.h"
#include "csrc/kernels/multi_array.h"
#include "csrc/memory/on_devices.h"
#include "csrc/optim/chunks.h"
#include "csrc/optim/tensor_list.h"
#include "csrc/optim/update_list.h"

namespace smp::optim {

namespace {

constexpr const char* kSums = "smp::sums_of_squares";
constexpr const char* kMax = "smp::max_abs";
constexpr const char* kScale = "smp::scale_";
constexpr const char* kDivisor = "smp::clip_divisor";

using Kernel = double (*)(const kernels::Array&, int64_t, int64_t);
using Launcher = decltype(&kernels::Launchers::max_abs);

// Reduces each array to one number: `combine` over its chunks, in order.
template <typename Combine>
void reduce_on_cpu(const std::vector<kernels::Array>& arrays, Kernel kernel,
                   Combine&& combine, double* results) {
  const std::vector<Chunk> chunks = chunks_of(arrays);
  std::vector<double> parts(chunks.size());
  for_chunks(chunks, [&](const Chunk& chunk, size_t idx) {
    parts[idx] = kernel(arrays[chunk.array_idx], chunk.begin, chunk.end);
  });
  std::fill(results, results + arrays.size(), 0.0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    double& result = results[chunks[i].array_idx];
    result = combine(result, parts[i]);
  }
}

template <typename Combine>
at::Tensor reduce_each(const char* op, at::TensorList tensors, Kernel kernel,
                       Launcher launcher, Combine&& combine) {
  const auto device =
      tensors.empty() ? c10::Device(at::kCPU) : tensors[0].device();
  check_tensors(op, tensors, device.type());
  const auto num_tensors = static_cast<int64_t>(tensors.size());
  const auto in_double = at::TensorOptions().dtype(at::kDouble).device(device);
  const at::Tensor results = at::empty({num_tensors}, in_double);
  if (device.is_meta() || tensors.empty()) return results;
  const std::vector<at::Tensor> dense = in_one_piece(tensors);
  const auto arrays = as_arrays(dense);
  double* data = results.mutable_data_ptr<double>();
  if (!is_accelerator(device)) {
    reduce_on_cpu(arrays, kernel, combine, data);
    return results;
  }
  // The memory belongs to the caller's stream; it is reused only after the
  // kernels.
  const kernels::Launchers& launchers = kernels::launchers_of(device);
  const at::Tensor partials = at::empty(
      {launchers.num_partials(arrays.data(), num_tensors)}, in_double);
  memory::run_on_device(op, device, [&](void* stream) {
    return (launchers.*launcher)(arrays.data(), num_tensors,
                                 partials.mutable_data_ptr<double>(), data,
                                 stream);
  });
  return results;
}

// Checks that a list is empty. Called with an empty list, which names no
// device, and with tensors of a kind that has no kernel.
void check_empty(const char* op, at::TensorList tensors) {
  TORCH_CHECK_VALUE(tensors.empty(), rank_prefix(), op,
                    " takes dense CPU or CUDA tensors, got one on ",
                    tensors[0].device(), " with layout ", tensors[0].layout());
}

at::Tensor zero_of_none(at::TensorList tensors) {
  check_empty("smp::sum_of_squares, smp::found_nonfinite", tensors);
  return at::zeros({}, at::TensorOptions().dtype(at::kDouble));
}

at::Tensor nothing_of_none(at::TensorList tensors) {
  check_empty("smp::sums_of_squares, smp::max_abs", tensors);
  return at::zeros({0}, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace

at::Tensor sums_of_squares(at::TensorList tensors) {
  return reduce_each(kSums, tensors, kernels::fused().sum_of_squares,
                     &kernels::Launchers::sums_of_squares,
                     [](double a, double b) { return a + b; });
}

at::Tensor sum_of_squares(at::TensorList tensors) {
  const at::Tensor sums = sums_of_squares(tensors);
  if (!sums.is_cpu()) return sums.sum();
  // In order, whatever the number of threads.
  const at::Tensor result = at::empty({}, sums.options());
  const double* data = sums.const_data_ptr<double>();
  double total = 0;
  for (int64_t i = 0; i < sums.numel(); ++i) total += data[i];
  *result.mutable_data_ptr<double>() = total;
  return result;
}

at::Tensor max_abs(at::TensorList tensors) {
  return reduce_each(
      kMax, tensors, kernels::fused().max_abs, &kernels::Launchers::max_abs,
      // NaN stays.
      [](double a, double b) { return a > b || a != a ? a : b; });
}

at::Tensor found_nonfinite(at::TensorList tensors) {
  return max_abs(tensors).isfinite().all().logical_not().to(at::kDouble);
}

void scale_(at::TensorList tensors, const at::Tensor& factor) {
  if (tensors.empty()) return;
  const c10::Device device = tensors[0].device();
  check_tensors(kScale, tensors, device.type());
  check_dense(kScale, tensors);
  TORCH_CHECK_VALUE(factor.numel() == 1 && factor.is_floating_point(),
                    rank_prefix(), kScale,
                    ": factor must be one floating point number, got sizes ",
                    factor.sizes(), " of ", factor.scalar_type());
  if (!device.is_meta()) {
    const at::Tensor number =
        factor.to(at::TensorOptions().dtype(at::kDouble).device(device), true);
    const double* data = number.const_data_ptr<double>();
    const auto arrays = as_arrays(tensors);
    if (is_accelerator(device)) {
      memory::run_on_device(kScale, device, [&](void* stream) {
        return kernels::launchers_of(device).scale(
            arrays.data(), static_cast<int64_t>(arrays.size()), data, stream);
      });
    } else if (*data != 1) {
      for_chunks(chunks_of(arrays), [&](const Chunk& chunk, size_t) {
        kernels::fused().scale(arrays[chunk.array_idx], *data, chunk.begin,
                               chunk.end);
      });
    }
  }
  bump_versions(tensors);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> clip_divisor(
    const at::Tensor& sum_of_squares, double max_norm,
    const std::optional<at::Tensor>& grad_scale, double eps) {
  TORCH_CHECK_VALUE(
      sum_of_squares.dim() == 0 && sum_of_squares.scalar_type() == at::kDouble,
      rank_prefix(), kDivisor,
      ": sum_of_squares must be a float64 tensor without "
      "dimensions, got sizes ",
      sum_of_squares.sizes(), " of ", sum_of_squares.scalar_type());
  TORCH_CHECK_VALUE(max_norm >= 0, rank_prefix(), kDivisor,
                    ": max_norm must be >= 0, got ", max_norm);
  at::Tensor norm = sum_of_squares.sqrt();
  const at::Tensor found_inf =
      sum_of_squares.isfinite().logical_not().to(at::kDouble);
  if (!grad_scale.has_value()) {
    return {norm.add(eps).div(max_norm).clamp_min(1), norm, found_inf};
  }
  TORCH_CHECK_VALUE(grad_scale->numel() == 1, rank_prefix(), kDivisor,
                    ": grad_scale must be one number, got sizes ",
                    grad_scale->sizes());
  const at::Tensor scale = grad_scale->to(sum_of_squares.options()).reshape({});
  norm = norm.div(scale);
  return {norm.add(eps).div(max_norm).clamp_min(1).mul(scale), norm, found_inf};
}

// sums_of_squares: of each tensor, float64 [tensors] on their device.
// sum_of_squares: of all elements, a float64 without dimensions (on the CPU for
// an empty list).
// max_abs: the largest absolute value of each tensor, as sums_of_squares.
// found_nonfinite: 1 if an element is infinite or NaN, else 0, as
// sum_of_squares.
// scale_: multiplies every element by `factor`, in place; 1 costs nothing.
// clip_divisor: what gradients are divided by so that their norm is at most
// `max_norm`: grad_scale * max(1, (norm + eps) / max_norm), infinite for 0; the
// norm, that of gradients divided by `grad_scale`; and 1 where it is not
// finite, else 0.
// Sums on the CPU do not depend on the number of threads.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("sums_of_squares(Tensor[] tensors) -> Tensor");
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
  m.def("max_abs(Tensor[] tensors) -> Tensor");
  m.def("found_nonfinite(Tensor[] tensors) -> Tensor");
  m.def("scale_(Tensor(a!)[] tensors, Tensor factor) -> ()");
  m.def(
      "clip_divisor(Tensor sum_of_squares, float max_norm, "
      "Tensor? grad_scale=None, float eps=1e-6) -> (Tensor, Tensor, Tensor)");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("sums_of_squares", &sums_of_squares);
  m.impl("sum_of_squares", &sum_of_squares);
  m.impl("max_abs", &max_abs);
  m.impl("found_nonfinite", &found_nonfinite);
  m.impl("scale_", &scale_);
})

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) {
  m.impl("sums_of_squares", &nothing_of_none);
  m.impl("sum_of_squares", &zero_of_none);
  m.impl("max_abs", &nothing_of_none);
  m.impl("found_nonfinite", &zero_of_none);
  m.impl("clip_divisor", &clip_divisor);
}

}  // namespace smp::optim
