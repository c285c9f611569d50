#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/autocast.h"
#include "csrc/tensor_parallel/pieces.h"
#include "csrc/tensor_parallel/region_call.h"
#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSummedLinear = "summed_linear";
constexpr const char* kSummedLinearBackward = "backward of summed_linear";

struct SummedLinearCall {
  GroupPtr group;
  bool has_other;
  bool was_alone = alone();
};

// Returns this rank's term of a piece, [t, ..., out].
at::Tensor term_of(const at::Tensor& x, const at::Tensor& weight,
                   const std::optional<at::Tensor>& other, int64_t piece) {
  std::vector<int64_t> shape = x[piece].sizes().vec();
  shape.back() = weight.size(0);
  const at::Tensor input = flat(x[piece]);
  if (!other) return at::mm(input, weight.t()).view(shape);
  return at::addmm(flat((*other)[piece]), input, weight.t()).view(shape);
}

// The gradient of a piece is multiplied while the next ones are on their way.
variable_list run_backward(AutogradContext* context,
                           const SummedLinearCall& call,
                           const at::Tensor& grad) {
  const variable_list saved = context->get_saved_variables();
  const at::Tensor& x = saved[0];
  GatherOfPieces gather(*call.group, grad, kSummedLinearBackward);
  variable_list results(4);
  if (context->needs_input_grad(0)) {
    results[1] = at::empty_like(x, at::MemoryFormat::Contiguous);
    for (int64_t piece = 0; piece < x.size(0); ++piece) {
      at::Tensor to = flat(results[1][piece]);
      at::mm_out(to, flat(gather.take(piece)), saved[1]);
    }
  }
  const at::Tensor whole = gather.take_all();
  if (context->needs_input_grad(1)) {
    results[2] = at::mm(flat(whole).t(), flat(x));
  }
  if (call.has_other) results[3] = whole;
  return results;
}

struct SummedLinear : torch::autograd::Function<SummedLinear> {
  static at::Tensor forward(AutogradContext* context,
                            const SummedLinearCall& call, const at::Tensor& x,
                            const at::Tensor& weight,
                            const std::optional<at::Tensor>& other) {
    keep(context, call);
    context->save_for_backward({x, weight});
    SumOfPieces sum(*call.group, x.size(0), kSummedLinear);
    for (int64_t piece = 0; piece < x.size(0); ++piece) {
      sum.begin(term_of(x, weight, other, piece));
    }
    return sum.take();
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto& call = kept<SummedLinearCall>(context);
    const AloneScope alone(call.was_alone);
    variable_list results;
    {
      at::NoGradGuard no_grad;
      results = run_backward(context, call, with_data(grads[0]));
    }
    return autograd::once(kSummedLinear, std::move(results), grads);
  }
};

}  // namespace

at::Tensor summed_linear(const GroupPtr& group, const at::Tensor& x,
                         const at::Tensor& weight,
                         const std::optional<at::Tensor>& other) {
  SMP_CHECK_VALUE(x.dim() > 3 && x.size(1) == group->size() &&
                      weight.dim() == 2 && weight.size(1) == x.size(-1),
                  kSummedLinear, ": expected pieces [c, ", group->size(),
                  ", ..., in] and a weight [out, in], got ", x.sizes(), " and ",
                  weight.sizes());
  const at::Tensor input = as_autocast(x);
  const at::Tensor matrix = as_autocast(weight);
  std::optional<at::Tensor> term;
  if (other) term = as_autocast(*other);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return SummedLinear::apply(SummedLinearCall{group, other.has_value()}, input,
                             matrix, term);
}

}  // namespace smp::tensor_parallel
