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

constexpr const char* kRotaryOp = "smp::rotary";

void check_table(const char* name, const at::Tensor& table,
                 const at::Tensor& x) {
  check_floats(kRotaryOp, name, table);
  TORCH_CHECK_VALUE(
      table.dim() == 3 && (table.size(0) == 1 || table.size(0) == x.size(0)) &&
          table.size(1) == x.size(1) && 2 * table.size(2) <= x.size(3),
      rank_prefix(), kRotaryOp, ": ", name,
      " must have sizes [batch or 1, length, at most head_size / 2], for x of ",
      "sizes ", x.sizes(), ", got ", table.sizes());
  TORCH_CHECK_VALUE(table.device() == x.device(), rank_prefix(), kRotaryOp,
                    ": ", name, " is on ", table.device(), ", x on ",
                    x.device(), "; move one of them");
}

at::Tensor rotary_apply(const at::Tensor& x, const at::Tensor& cos,
                        const at::Tensor& sin, bool is_interleaved,
                        bool is_inverse) {
  check_floats(kRotaryOp, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 4, rank_prefix(), kRotaryOp,
                    ": x must be [batch, length, heads, head_size], got sizes ",
                    x.sizes());
  check_table("cos", cos, x);
  check_table("sin", sin, x);
  TORCH_CHECK_VALUE(cos.sizes() == sin.sizes(), rank_prefix(), kRotaryOp,
                    ": cos and sin must have the same sizes, got ", cos.sizes(),
                    " and ", sin.sizes());
  const at::Tensor y = new_like(x);
  if (x.is_meta() || x.numel() == 0) return y;
  // Heads of a fused projection are views with gaps, which the kernel takes.
  const at::Tensor source = x.stride(3) == 1 ? x : x.contiguous();
  const at::Tensor cosines = in_compute_type(cos, x);
  const at::Tensor sines = in_compute_type(sin, x);
  const kernels::Rotary rotary = {
      data_of(source),  data_of(cosines), data_of(sines),   mutable_data_of(y),
      x.size(0),        x.size(1),        x.size(2),        x.size(3),
      cos.size(2),      source.stride(0), source.stride(1), source.stride(2),
      cos.size(0) != 1, is_interleaved,   is_inverse,       kernel_dtype(x)};
  if (is_accelerator(x.device())) {
    memory::run_on_device(kRotaryOp, x.device(), [&](void* stream) {
      return kernels::launchers_of(x.device()).rotary(rotary, stream);
    });
  } else {
    for_rows(x.size(0) * x.size(1), x.size(2) * x.size(3),
             [&](int64_t begin, int64_t end) {
               kernels::fused().rotary(rotary, begin, end);
             });
  }
  return y;
}

at::Tensor call_rotary_apply(const at::Tensor& x, const at::Tensor& cos,
                             const at::Tensor& sin, bool is_interleaved,
                             bool is_inverse) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("smp::rotary_apply", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, bool, bool)>();
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x, cos, sin, is_interleaved, is_inverse);
}

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& cos, const at::Tensor& sin,
                            bool is_interleaved) {
    context->save_for_backward({cos, sin});
    context->saved_data["is_interleaved"] = is_interleaved;
    return call_rotary_apply(x, cos, sin, is_interleaved, false);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor dx =
        call_rotary_apply(gradients[0], saved[0], saved[1],
                          context->saved_data["is_interleaved"].toBool(), true);
    variable_list results = autograd::once(kRotaryOp, {dx}, gradients);
    results.resize(4);
    return results;
  }
};

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin, bool is_interleaved) {
  TORCH_CHECK_VALUE(
      !(at::GradMode::is_enabled() &&
        (cos.requires_grad() || sin.requires_grad())),
      rank_prefix(), kRotaryOp,
      ": cos and sin get no gradient, but require one; detach them");
  return RotaryFunction::apply(x, cos, sin, is_interleaved);
}

}  // namespace

// rotary: pairs of features of x rotated by the angles of a table, with the
// gradient of x.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "rotary(Tensor x, Tensor cos, Tensor sin, bool is_interleaved) -> Tensor",
      &rotary);
  m.def(
      "rotary_apply(Tensor x, Tensor cos, Tensor sin, bool is_interleaved, "
      "bool is_inverse) -> Tensor");
}

SMP_IMPL_ON_ALL_DEVICES(m, { m.impl("rotary_apply", &rotary_apply); })

}  // namespace smp::nn
