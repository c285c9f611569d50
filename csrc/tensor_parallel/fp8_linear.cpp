#include "csrc/tensor_parallel/fp8_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/autocast.h"
#include "csrc/tensor_parallel/region_call.h"

namespace smp::tensor_parallel {
namespace {

using nn::Fp8Scaling;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "fp8_linear";

struct Fp8Call {
  nn::Fp8Recipe recipe;
  std::vector<int64_t> input_shape;
  std::optional<c10::ScalarType> bias_type;
  bool was_alone = alone();
};

at::Tensor as_rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

std::vector<int64_t> with_last(std::vector<int64_t> shape, int64_t size) {
  shape.back() = size;
  return shape;
}

struct Fp8Linear : torch::autograd::Function<Fp8Linear> {
  static at::Tensor forward(AutogradContext* context, const Fp8Call& call,
                            const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    const nn::Fp8Forward result = nn::fp8_forward(
        call.recipe, as_rows(x), weight, bias.value_or(at::Tensor()));
    keep(context, call);
    if (call.recipe.scaling == Fp8Scaling::kRowwise) {
      context->save_for_backward({weight, x});
    } else {
      context->save_for_backward({weight, result.x.codes, result.x.factor});
    }
    // Callers may write to the result, which they may not to a view.
    return at::_unsafe_view(result.outputs[0],
                            with_last(call.input_shape, weight.size(0)));
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const Fp8Call& call = kept<Fp8Call>(context);
    const AloneScope alone(call.was_alone);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[0];
    variable_list results(4);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      const at::Tensor grad = as_rows(with_data(grads)[0]);
      const bool needs_x = context->needs_input_grad(0);
      nn::Fp8Backward backward(
          call.recipe, {grad},
          needs_x ? at::TensorList(weight) : at::TensorList());
      if (needs_x) results[1] = backward.input_grad().view(call.input_shape);
      if (context->needs_input_grad(1)) {
        results[2] =
            saved.size() == 2
                ? backward.weight_grad(0, as_rows(saved[1]))
                : backward.weight_grad(0, nn::Fp8Matrix{saved[1], saved[2]});
      }
      if (call.bias_type && context->needs_input_grad(2)) {
        results[3] = grad.sum(0).to(*call.bias_type);
      }
    }
    return autograd::once(kName, std::move(results), grads);
  }
};

at::Tensor whole_fp8_linear(const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            c10::string_view scaling) {
  return fp8_linear(nullptr, x, weight, bias, std::string(scaling),
                    nn::SplitFeatures::kNone);
}

}  // namespace

nn::Fp8Recipe fp8_recipe(const GroupPtr& group, const std::string& scaling,
                         nn::SplitFeatures split) {
  nn::Fp8Recipe recipe{nn::fp8_scaling(scaling), split, nullptr};
  if (!group || group->size() == 1) recipe.split = nn::SplitFeatures::kNone;
  if (recipe.split == nn::SplitFeatures::kNone) return recipe;
  recipe.max_over_ranks = [group](const at::Tensor& maxima) {
    return group
        ->begin_all_reduce(maxima, comm::ReduceOp::kMax, "factors of fp8",
                           /*may_overwrite=*/true)
        .take();
  };
  return recipe;
}

at::Tensor fp8_linear(const GroupPtr& group, const at::Tensor& x,
                      const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::string& scaling, nn::SplitFeatures split) {
  SMP_CHECK_VALUE(
      weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), kName,
      ": expected an input [..., in] and a weight [out, in]", ", got ",
      x.sizes(), " and ", weight.sizes());
  const at::Tensor input = as_autocast(x);
  const at::Tensor matrix = as_autocast(weight);
  SMP_CHECK_VALUE(input.scalar_type() == matrix.scalar_type(), kName,
                  ": expected an input and a weight of one dtype, got ",
                  input.scalar_type(), " and ", matrix.scalar_type());
  Fp8Call call;
  call.recipe = fp8_recipe(group, scaling, split);
  call.input_shape = input.sizes().vec();
  if (bias) call.bias_type = bias->scalar_type();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return Fp8Linear::apply(call, input, matrix, bias);
}

// fp8_linear(x, weight, bias, scaling): a linear layer of one rank, whose
// operands have 8 bits. With gradients.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "fp8_linear(Tensor x, Tensor weight, Tensor? bias, str scaling) -> "
      "Tensor",
      &whole_fp8_linear);
}

}  // namespace smp::tensor_parallel
