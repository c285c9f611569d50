
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/launchers.h"
#include "csrc/nn/tensors.h"

namespace smp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using NormResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr const char* kLayerNorm = "smp::layer_norm";
constexpr const char* kRmsNorm = "smp::rms_norm";

const char* name_of(bool is_rms) { return is_rms ? kRmsNorm : kLayerNorm; }

// Returns y, mean (undefined for RMS norm) and rstd.
NormResult norm_forward(const at::Tensor& x, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool is_rms) {
  const char* op = name_of(is_rms);
  check_floats(op, "x", x);
  const Rows rows = rows_of(op, x);
  check_vector(op, "weight", weight, rows.columns, x);
  check_vector(op, "bias", bias, rows.columns, x);
  const at::Tensor y = new_like(x);
  at::Tensor mean;
  if (!is_rms) mean = new_tensor({rows.count}, compute_type(x), x);
  const at::Tensor rstd = new_tensor({rows.count}, compute_type(x), x);
  if (x.is_meta() || rows.count == 0) return {y, mean, rstd};

  const at::Tensor dense = x.contiguous();
  const at::Tensor weights = in_compute_type(weight, x);
  const at::Tensor biases = in_compute_type(bias, x);
  const kernels::Norm norm = {data_of(dense),
                              data_of(weights),
                              data_of(biases),
                              mutable_data_of(y),
                              mutable_data_of(mean),
                              mutable_data_of(rstd),
                              rows.count,
                              rows.columns,
                              eps,
                              is_rms,
                              kernel_dtype(x)};
  if (is_accelerator(x.device())) {
    memory::run_on_device(op, x.device(), [&](void* stream) {
      return kernels::launchers_of(x.device()).norm_forward(norm, stream);
    });
  } else {
    for_rows(rows.count, rows.columns, [&](int64_t begin, int64_t end) {
      kernels::fused().norm_forward(norm, begin, end);
    });
  }
  return {y, mean, rstd};
}

at::Tensor sums_on_device(const kernels::NormBackward& norm, const char* op,
                          const at::Tensor& x, bool wants_sums) {
  at::Tensor sums;
  if (wants_sums) {
    sums = new_tensor(
        {2, kernels::launchers_of(x.device()).norm_partial_rows(norm),
         norm.num_columns},
        compute_type(x), x);
  }
  memory::run_on_device(op, x.device(), [&](void* stream) {
    return kernels::launchers_of(x.device())
        .norm_backward(norm, mutable_data_of(sums), stream);
  });
  return wants_sums ? sums.sum(1) : sums;
}

at::Tensor sums_on_cpu(const kernels::NormBackward& norm, const at::Tensor& x,
                       bool wants_sums) {
  if (!wants_sums) {
    for_rows(norm.num_rows, norm.num_columns, [&](int64_t begin, int64_t end) {
      kernels::fused().norm_backward(norm, begin, end, nullptr, nullptr);
    });
    return {};
  }
  const c10::ScalarType type = compute_type(x);
  const auto second =
      norm.num_columns * static_cast<int64_t>(c10::elementSize(type));
  return sum_over_rows(2, norm.num_rows, norm.num_columns, type,
                       [&](int64_t begin, int64_t end, char* sums) {
                         kernels::fused().norm_backward(norm, begin, end, sums,
                                                        sums + second);
                       });
}

// Returns dx, dweight and dbias; undefined where not wanted.
NormResult norm_backward(const at::Tensor& dy, const at::Tensor& x,
                         const OptionalTensor& mean, const at::Tensor& rstd,
                         const OptionalTensor& weight, bool is_rms,
                         std::array<bool, 3> wanted) {
  const char* op = name_of(is_rms);
  check_floats(op, "dy", dy);
  const Rows rows = rows_of(op, x);
  const auto type = compute_type(x);
  at::Tensor dx, sums;
  if (wanted[0]) dx = new_like(x);
  const bool wants_sums = wanted[1] || wanted[2];
  if (x.is_meta()) {
    if (wants_sums) sums = new_tensor({2, rows.columns}, type, x);
  } else if (rows.count == 0) {
    if (wants_sums) {
      sums = new_zeros({2, rows.columns}, type, x);
    }
  } else {
    const at::Tensor dense_dy = dy.to(x.scalar_type()).contiguous();
    const at::Tensor dense_x = x.contiguous();
    const at::Tensor weights = in_compute_type(weight, x);
    const kernels::NormBackward norm = {data_of(dense_dy),
                                        data_of(dense_x),
                                        data_of(mean.value_or(at::Tensor())),
                                        data_of(rstd),
                                        data_of(weights),
                                        mutable_data_of(dx),
                                        rows.count,
                                        rows.columns,
                                        is_rms,
                                        kernel_dtype(x)};
    sums = is_accelerator(x.device()) ? sums_on_device(norm, op, x, wants_sums)
                                      : sums_on_cpu(norm, x, wants_sums);
  }
  const auto sum_of = [&](int64_t which) {
    return wanted[1 + which] ? sums.select(0, which).clone() : at::Tensor();
  };
  return {dx, sum_of(0), sum_of(1)};
}

class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const OptionalTensor& weight,
                            const OptionalTensor& bias, double eps,
                            bool is_rms) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::norm_forward", "")
            .typed<NormResult(const at::Tensor&, const OptionalTensor&,
                              const OptionalTensor&, double, bool)>();
    auto [y, mean, rstd] = op.call(x, weight, bias, eps, is_rms);
    context->save_for_backward({x, weight.value_or(at::Tensor()), mean, rstd});
    context->saved_data["is_rms"] = is_rms;
    // The context does not count absent tensors as inputs.
    const int64_t bias_idx = weight.has_value() ? 2 : 1;
    context->saved_data["bias_idx"] = bias.has_value() ? bias_idx : -1;
    if (bias.has_value()) {
      context->saved_data["bias_type"] =
          static_cast<int64_t>(bias->scalar_type());
    }
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const bool is_rms = context->saved_data["is_rms"].toBool();
    const int64_t bias_idx = context->saved_data["bias_idx"].toInt();
    const at::Tensor& weight = saved[1];
    const std::array<bool, 3> wanted = {
        context->needs_input_grad(0),
        weight.defined() && context->needs_input_grad(1),
        bias_idx >= 0 && context->needs_input_grad(bias_idx)};
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::norm_backward", "")
            .typed<NormResult(const at::Tensor&, const at::Tensor&,
                              const OptionalTensor&, const at::Tensor&,
                              const OptionalTensor&, bool,
                              std::array<bool, 3>)>();
    at::Tensor dx, dweight, dbias;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(dx, dweight, dbias) =
          op.call(gradients[0], saved[0], given(saved[2]), saved[3],
                  given(weight), is_rms, wanted);
      if (dweight.defined()) dweight = dweight.to(weight.scalar_type());
      if (dbias.defined()) {
        dbias = dbias.to(static_cast<c10::ScalarType>(
            context->saved_data["bias_type"].toInt()));
      }
    }
    variable_list results =
        autograd::once(name_of(is_rms), {dx, dweight, dbias}, gradients);
    results.resize(5);
    return results;
  }
};

at::Tensor layer_norm(const at::Tensor& x, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps) {
  return NormFunction::apply(x, weight, bias, eps, false);
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight,
                    double eps) {
  return NormFunction::apply(x, weight, OptionalTensor(), eps, true);
}

}  // namespace

// layer_norm, rms_norm: over the last dimension, with gradients. norm_forward
// gives y, mean and 1 / standard deviation; norm_backward the gradients of x,
// weight and bias, the last two in the type that is computed in.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
      &layer_norm);
  m.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", &rms_norm);
  m.def(
      "norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, "
      "bool is_rms) -> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, "
      "Tensor? weight, bool is_rms, bool[3] wanted) -> "
      "(Tensor, Tensor, Tensor)");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("norm_forward", &norm_forward);
  m.impl("norm_backward", &norm_backward);
})

}  // namespace smp::nn
