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

constexpr const char* kBiasGeluOp = "smp::bias_gelu";

at::Tensor bias_gelu_forward(const at::Tensor& x, const OptionalTensor& bias,
                             bool is_tanh) {
  check_floats(kBiasGeluOp, "x", x);
  const Rows rows = rows_of(kBiasGeluOp, x);
  check_vector(kBiasGeluOp, "bias", bias, rows.columns, x);
  const at::Tensor y = new_like(x);
  if (x.is_meta() || rows.count == 0) return y;
  const at::Tensor dense = x.contiguous();
  const at::Tensor biases = in_compute_type(bias, x);
  const kernels::BiasGelu gelu = {
      data_of(dense), data_of(biases), nullptr, mutable_data_of(y),
      rows.count,     rows.columns,    is_tanh, kernel_dtype(x)};
  if (is_accelerator(x.device())) {
    memory::run_on_device(kBiasGeluOp, x.device(), [&](void* stream) {
      return kernels::launchers_of(x.device()).bias_gelu_forward(gelu, stream);
    });
  } else {
    for_rows(rows.count, rows.columns, [&](int64_t begin, int64_t end) {
      kernels::fused().bias_gelu_forward(gelu, begin, end);
    });
  }
  return y;
}

// Returns dx and dbias (in the compute type; undefined unless wanted).
Pair bias_gelu_backward(const at::Tensor& dy, const at::Tensor& x,
                        const OptionalTensor& bias, bool is_tanh,
                        bool wants_dbias) {
  check_floats(kBiasGeluOp, "dy", dy);
  const Rows rows = rows_of(kBiasGeluOp, x);
  const auto type = compute_type(x);
  const at::Tensor dx = new_like(x);
  if (x.is_meta()) {
    return {dx,
            wants_dbias ? new_tensor({rows.columns}, type, x) : at::Tensor()};
  }
  if (rows.count == 0) {
    return {dx,
            wants_dbias ? new_zeros({rows.columns}, type, x) : at::Tensor()};
  }
  const at::Tensor dense_x = x.contiguous();
  const at::Tensor dense_dy = dy.to(x.scalar_type()).contiguous();
  const at::Tensor biases = in_compute_type(bias, x);
  const kernels::BiasGelu gelu = {
      data_of(dense_x), data_of(biases), data_of(dense_dy), mutable_data_of(dx),
      rows.count,       rows.columns,    is_tanh,           kernel_dtype(x)};
  if (is_accelerator(x.device())) {
    at::Tensor sums;
    if (wants_dbias) {
      sums = new_tensor({kernels::launchers_of(x.device())
                             .column_partial_rows(rows.count, rows.columns),
                         rows.columns},
                        type, x);
    }
    memory::run_on_device(kBiasGeluOp, x.device(), [&](void* stream) {
      return kernels::launchers_of(x.device())
          .bias_gelu_backward(gelu, mutable_data_of(sums), stream);
    });
    return {dx, wants_dbias ? sums.sum(0) : sums};
  }
  if (wants_dbias) {
    const at::Tensor sums = sum_over_rows(
        1, rows.count, rows.columns, type,
        [&](int64_t begin, int64_t end, char* dbias) {
          kernels::fused().bias_gelu_backward(gelu, begin, end, dbias);
        });
    return {dx, sums.select(0, 0)};
  }
  for_rows(rows.count, rows.columns, [&](int64_t begin, int64_t end) {
    kernels::fused().bias_gelu_backward(gelu, begin, end, nullptr);
  });
  return {dx, at::Tensor()};
}

class BiasGeluFunction : public torch::autograd::Function<BiasGeluFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const OptionalTensor& bias, bool is_tanh) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::bias_gelu_forward", "")
            .typed<at::Tensor(const at::Tensor&, const OptionalTensor&,
                              bool)>();
    context->save_for_backward({x, bias.value_or(at::Tensor())});
    context->saved_data["is_tanh"] = is_tanh;
    return op.call(x, bias, is_tanh);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::bias_gelu_backward", "")
            .typed<Pair(const at::Tensor&, const at::Tensor&,
                        const OptionalTensor&, bool, bool)>();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& bias = saved[1];
    const bool wants_dbias = bias.defined() && context->needs_input_grad(1);
    at::Tensor dx, dbias;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::tie(dx, dbias) =
          op.call(gradients[0], saved[0], given(bias),
                  context->saved_data["is_tanh"].toBool(), wants_dbias);
      if (wants_dbias) dbias = dbias.to(bias.scalar_type());
    }
    variable_list results = autograd::once(kBiasGeluOp, {dx, dbias}, gradients);
    results.resize(3);
    return results;
  }
};

at::Tensor bias_gelu(const at::Tensor& x, const OptionalTensor& bias,
                     bool is_tanh) {
  return BiasGeluFunction::apply(x, bias, is_tanh);
}

}  // namespace

// bias_gelu: gelu(x + bias) with gradients, exact or with tanh.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, bool is_tanh) -> Tensor",
        &bias_gelu);
  m.def("bias_gelu_forward(Tensor x, Tensor? bias, bool is_tanh) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool is_tanh, "
      "bool wants_dbias) -> (Tensor, Tensor)");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("bias_gelu_forward", &bias_gelu_forward);
  m.impl("bias_gelu_backward", &bias_gelu_backward);
})

}  // namespace smp::nn
