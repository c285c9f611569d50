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

using Pair = std::tuple<at::Tensor, at::Tensor>;

constexpr const char* kBiasDropoutResidualOp = "smp::bias_dropout_residual";

bool is_16_bit(c10::ScalarType type) { return c10::elementSize(type) == 2; }

void check_types(const at::Tensor& x, c10::ScalarType y_type) {
  TORCH_CHECK_VALUE(y_type == x.scalar_type() ||
                        (y_type == at::kFloat && is_16_bit(x.scalar_type())),
                    rank_prefix(), kBiasDropoutResidualOp, ": the result of ",
                    x.scalar_type(),
                    " input can be of that type, or float32 for 16 bits, not ",
                    y_type);
}

at::Tensor bias_dropout_residual_forward(const at::Tensor& x,
                                         const OptionalTensor& bias,
                                         const OptionalTensor& residual,
                                         double p, int64_t seed,
                                         c10::ScalarType y_type) {
  check_floats(kBiasDropoutResidualOp, "x", x);
  check_types(x, y_type);
  const Rows rows = rows_of(kBiasDropoutResidualOp, x);
  check_vector(kBiasDropoutResidualOp, "bias", bias, rows.columns, x);
  const at::Tensor y = new_tensor(x.sizes(), y_type, x);
  if (x.is_meta() || rows.count == 0) return y;
  const at::Tensor dense = x.contiguous();
  const at::Tensor biases = in_compute_type(bias, x);
  at::Tensor added;
  if (residual.has_value()) added = residual->to(y_type).contiguous();
  const kernels::BiasDropoutResidual op = {
      data_of(dense),
      data_of(biases),
      data_of(added),
      mutable_data_of(y),
      rows.count,
      rows.columns,
      kernels::make_dropout(p, static_cast<uint64_t>(seed)),
      kernel_dtype(x),
      kernel_dtype(y)};
  if (is_accelerator(x.device())) {
    memory::run_on_device(kBiasDropoutResidualOp, x.device(),
                          [&](void* stream) {
                            return kernels::launchers_of(x.device())
                                .bias_dropout_residual_forward(op, stream);
                          });
  } else {
    for_rows(rows.count, rows.columns, [&](int64_t begin, int64_t end) {
      kernels::fused().bias_dropout_residual_forward(op, begin, end);
    });
  }
  return y;
}

// Returns dx (of x_type) and dbias (in the compute type; undefined unless
// wanted).
Pair bias_dropout_residual_backward(const at::Tensor& dy,
                                    c10::ScalarType x_type, double p,
                                    int64_t seed, bool wants_dbias) {
  check_floats(kBiasDropoutResidualOp, "dy", dy);
  const Rows rows = rows_of(kBiasDropoutResidualOp, dy);
  const at::Tensor dx = new_tensor(dy.sizes(), x_type, dy);
  const auto type = compute_type(dx);
  if (dy.is_meta()) {
    return {dx,
            wants_dbias ? new_tensor({rows.columns}, type, dy) : at::Tensor()};
  }
  if (rows.count == 0) {
    return {dx,
            wants_dbias ? new_zeros({rows.columns}, type, dy) : at::Tensor()};
  }
  const at::Tensor dense = dy.contiguous();
  const kernels::BiasDropoutResidualBackward op = {
      data_of(dense),
      mutable_data_of(dx),
      rows.count,
      rows.columns,
      kernels::make_dropout(p, static_cast<uint64_t>(seed)),
      kernel_dtype(dx),
      kernel_dtype(dy)};
  if (is_accelerator(dy.device())) {
    at::Tensor sums;
    if (wants_dbias) {
      sums = new_tensor({kernels::launchers_of(dy.device())
                             .column_partial_rows(rows.count, rows.columns),
                         rows.columns},
                        type, dy);
    }
    memory::run_on_device(kBiasDropoutResidualOp, dy.device(),
                          [&](void* stream) {
                            return kernels::launchers_of(dy.device())
                                .bias_dropout_residual_backward(
                                    op, mutable_data_of(sums), stream);
                          });
    return {dx, wants_dbias ? sums.sum(0) : sums};
  }
  if (wants_dbias) {
    const at::Tensor sums =
        sum_over_rows(1, rows.count, rows.columns, type,
                      [&](int64_t begin, int64_t end, char* dbias) {
                        kernels::fused().bias_dropout_residual_backward(
                            op, begin, end, dbias);
                      });
    return {dx, sums.select(0, 0)};
  }
  for_rows(rows.count, rows.columns, [&](int64_t begin, int64_t end) {
    kernels::fused().bias_dropout_residual_backward(op, begin, end, nullptr);
  });
  return {dx, at::Tensor()};
}

class BiasDropoutResidualFunction
    : public torch::autograd::Function<BiasDropoutResidualFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const OptionalTensor& bias,
                            const OptionalTensor& residual, double p,
                            int64_t seed, c10::ScalarType y_type) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::bias_dropout_residual_forward", "")
            .typed<at::Tensor(const at::Tensor&, const OptionalTensor&,
                              const OptionalTensor&, double, int64_t,
                              c10::ScalarType)>();
    auto& data = context->saved_data;
    data["x_type"] = static_cast<int64_t>(x.scalar_type());
    data["p"] = p;
    data["seed"] = seed;
    data["has_bias"] = bias.has_value();
    data["has_residual"] = residual.has_value();
    if (bias.has_value()) {
      data["bias_type"] = static_cast<int64_t>(bias->scalar_type());
    }
    return op.call(x, bias, residual, p, seed, y_type);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::bias_dropout_residual_backward", "")
            .typed<Pair(const at::Tensor&, c10::ScalarType, double, int64_t,
                        bool)>();
    auto& data = context->saved_data;
    // The context does not count absent tensors as inputs.
    const bool has_bias = data["has_bias"].toBool();
    const bool wants_dbias = has_bias && context->needs_input_grad(1);
    const bool wants_dresidual = data["has_residual"].toBool() &&
                                 context->needs_input_grad(has_bias ? 2 : 1);
    const bool wants_dx = context->needs_input_grad(0) || wants_dbias;
    at::Tensor dx, dbias, dresidual;
    if (wants_dresidual) dresidual = gradients[0];
    if (wants_dx) {
      at::AutoDispatchBelowADInplaceOrView below;
      const auto type = [&](const char* key) {
        return static_cast<c10::ScalarType>(data[key].toInt());
      };
      std::tie(dx, dbias) =
          op.call(gradients[0], type("x_type"), data["p"].toDouble(),
                  data["seed"].toInt(), wants_dbias);
      if (wants_dbias) dbias = dbias.to(type("bias_type"));
    }
    variable_list results = autograd::once(kBiasDropoutResidualOp,
                                           {dx, dbias, dresidual}, gradients);
    results.resize(6);
    return results;
  }
};

at::Tensor bias_dropout_residual(const at::Tensor& x,
                                 const OptionalTensor& bias,
                                 const OptionalTensor& residual, double p,
                                 int64_t seed, bool is_residual_fp32) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, rank_prefix(), kBiasDropoutResidualOp,
                    ": the probability must be in [0, 1], got ", p);
  check_floats(kBiasDropoutResidualOp, "x", x);
  c10::ScalarType y_type = x.scalar_type();
  if (is_residual_fp32) y_type = c10::promoteTypes(y_type, at::kFloat);
  OptionalTensor added;
  if (residual.has_value()) {
    check_floats(kBiasDropoutResidualOp, "residual", *residual);
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes(), rank_prefix(),
                      kBiasDropoutResidualOp,
                      ": x and residual must have the same sizes, got ",
                      x.sizes(), " and ", residual->sizes());
    y_type = c10::promoteTypes(y_type, residual->scalar_type());
    added = residual->to(y_type);
  }
  // Only 16-bit elements are widened in the kernel.
  const bool fits = y_type == x.scalar_type() ||
                    (y_type == at::kFloat && is_16_bit(x.scalar_type()));
  return BiasDropoutResidualFunction::apply(fits ? x : x.to(y_type), bias,
                                            added, p, seed, y_type);
}

}  // namespace

// bias_dropout_residual: residual + dropout(x + bias) with gradients. The
// result has the wider type of x and residual, at least float32 if asked for.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, "
      "float p, int seed, bool is_residual_fp32) -> Tensor",
      &bias_dropout_residual);
  m.def(
      "bias_dropout_residual_forward(Tensor x, Tensor? bias, Tensor? residual, "
      "float p, int seed, ScalarType y_type) -> Tensor");
  m.def(
      "bias_dropout_residual_backward(Tensor dy, ScalarType x_type, float p, "
      "int seed, bool wants_dbias) -> (Tensor, Tensor)");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("bias_dropout_residual_forward", &bias_dropout_residual_forward);
  m.impl("bias_dropout_residual_backward", &bias_dropout_residual_backward);
})

}  // namespace smp::nn
