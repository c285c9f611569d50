#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/nn/fp8.h"
#include "csrc/tensor_parallel/autocast.h"
#include "csrc/tensor_parallel/fp8_linear.h"
#include "csrc/tensor_parallel/pieces.h"
#include "csrc/tensor_parallel/region_call.h"
#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kGatheredLinears = "gathered_linears";
constexpr const char* kBackward = "backward of gathered_linears";

struct LinearsCall {
  GroupPtr group;
  std::optional<int64_t> dim;
  Sizes sizes;
  size_t num_outputs;
  std::vector<int> bias_of;  // index among the biases; -1: none
  bool was_alone = alone();
  std::optional<nn::Fp8Recipe> fp8;  // none: operands keep their dtype

  bool gathers() const { return dim.has_value() && group->size() > 1; }
  // Returns whether an input [c, 1, ..., features] is gathered piece by piece.
  // Operands of 8 bits are coded whole.
  bool in_pieces(const at::Tensor& x) const {
    return gathers() && !fp8 && *dim == 1 && sizes.empty() && x.dim() > 3 &&
           x.size(0) > 1 && x.size(1) == 1;
  }
};

// The arguments whose gradients are wanted; edges are in the order of the
// arguments.
struct Needs {
  Needs(AutogradContext* context, const LinearsCall& call)
      : context(context), call(call) {}

  bool x() const { return context->needs_input_grad(0); }
  bool weight(size_t i) const { return context->needs_input_grad(1 + i); }
  bool bias(size_t i) const {
    return call.bias_of[i] >= 0 &&
           context->needs_input_grad(1 + call.num_outputs + call.bias_of[i]);
  }
  bool any_weight() const {
    for (size_t i = 0; i < call.num_outputs; ++i) {
      if (weight(i)) return true;
    }
    return false;
  }

  AutogradContext* context;
  const LinearsCall& call;
};

// Returns the sum over the products, of this rank.
at::Tensor input_grad(const variable_list& grads, const variable_list& saved) {
  at::Tensor sum;
  std::vector<int64_t> shape;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    const at::Tensor& weight = saved[1 + i];
    if (sum.defined()) {
      sum.addmm_(flat(grads[i]), weight);
      continue;
    }
    sum = at::mm(flat(grads[i]), weight);
    shape = grads[i].sizes().vec();
    shape.back() = weight.size(1);
  }
  return sum.view(shape);
}

std::vector<int64_t> input_shape(const variable_list& grads,
                                 const variable_list& saved) {
  const auto given = std::find_if(grads.begin(), grads.end(),
                                  [](const auto& g) { return g.defined(); });
  std::vector<int64_t> shape = given->sizes().vec();
  shape.back() = saved[1].size(1);
  return shape;
}

nn::Fp8Backward fp8_backward(const LinearsCall& call, const Needs& needs,
                             const variable_list& grads,
                             const variable_list& saved) {
  variable_list matrices;
  for (const at::Tensor& grad : grads) {
    matrices.push_back(grad.defined() ? flat(grad) : grad);
  }
  const at::TensorList weights =
      needs.x() ? at::TensorList(saved).slice(1) : at::TensorList();
  return nn::Fp8Backward(*call.fp8, std::move(matrices), weights);
}

Pending begin_sum(const LinearsCall& call, const at::Tensor& dx) {
  if (call.group->size() == 1) return Pending(dx);
  if (call.gathers()) {
    return call.group->begin_reduce_scatter(dx, *call.dim, call.sizes,
                                            kBackward);
  }
  return call.group->begin_all_reduce(dx, comm::ReduceOp::kSum, kBackward,
                                      /*may_overwrite=*/true);
}

// The end of a transfer that has begun: waits for the result, once.
using Take = std::function<at::Tensor()>;

Take begin_whole_input(const LinearsCall& call, const at::Tensor& x) {
  if (!call.gathers()) return [x] { return x; };
  if (call.in_pieces(x)) {
    auto pieces = std::make_shared<GatherOfPieces>(*call.group, x, kBackward);
    return [pieces] { return pieces->take_all(); };
  }
  auto whole =
      call.group->begin_all_gather(x, *call.dim, call.sizes, kBackward);
  return [whole]() mutable { return whole.take(); };
}

// Begins to send a piece while the product of the next one runs.
Take begin_input_grad_by_piece(const LinearsCall& call, int64_t num_pieces,
                               const variable_list& grads,
                               const variable_list& saved) {
  auto sum = std::make_shared<SumOfPieces>(*call.group, num_pieces, kBackward);
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    variable_list of_piece;
    for (const at::Tensor& grad : grads) {
      of_piece.push_back(grad.defined() ? grad[piece] : grad);
    }
    sum->begin(input_grad(of_piece, saved));
  }
  return [sum] { return sum->take(); };
}

Take begin_input_grad(const LinearsCall& call, const variable_list& grads,
                      const variable_list& saved, nn::Fp8Backward* fp8) {
  if (call.in_pieces(saved[0])) {
    return begin_input_grad_by_piece(call, saved[0].size(0), grads, saved);
  }
  const at::Tensor own = fp8 ? fp8->input_grad().view(input_shape(grads, saved))
                             : input_grad(grads, saved);
  auto sum = begin_sum(call, own);
  return [sum]() mutable { return sum.take(); };
}

// Runs the backward. Both transfers are on their way while products that do not
// need them run.
variable_list run_backward(const LinearsCall& call, const Needs& needs,
                           const variable_list& grads,
                           const variable_list& saved) {
  variable_list results(1 + 1 + call.num_outputs);
  for (const int bias : call.bias_of) {
    if (bias >= 0) results.emplace_back();
  }
  Take whole;
  if (needs.any_weight()) whole = begin_whole_input(call, saved[0]);
  std::optional<nn::Fp8Backward> fp8;
  if (call.fp8) fp8.emplace(fp8_backward(call, needs, grads, saved));
  Take dx;
  if (needs.x()) {
    dx = begin_input_grad(call, grads, saved, fp8 ? &*fp8 : nullptr);
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined() || !needs.bias(i)) continue;
    results[2 + call.num_outputs + call.bias_of[i]] = flat(grads[i]).sum(0);
  }
  if (whole) {
    const at::Tensor inputs = flat(whole());
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined() || !needs.weight(i)) continue;
      results[2 + i] = fp8 ? fp8->weight_grad(i, inputs)
                           : at::mm(flat(grads[i]).t(), inputs);
    }
  }
  if (dx) results[1] = dx();
  return results;
}

std::optional<at::Tensor> bias_of(const LinearsCall& call, size_t i,
                                  at::TensorList biases) {
  const int bias = call.bias_of[i];
  return bias < 0 ? std::nullopt : std::optional<at::Tensor>(biases[bias]);
}

at::Tensor whole_input(const LinearsCall& call, const at::Tensor& x) {
  if (!call.gathers()) return x;
  return call.group
      ->begin_all_gather(x, *call.dim, call.sizes, kGatheredLinears)
      .take();
}

variable_list fp8_products(const LinearsCall& call, const at::Tensor& x,
                           at::TensorList weights, at::TensorList biases) {
  const at::Tensor whole = whole_input(call, x);
  variable_list bias_of;
  for (const int bias : call.bias_of) {
    bias_of.push_back(bias < 0 ? at::Tensor() : biases[bias]);
  }
  variable_list outputs =
      nn::fp8_forward(*call.fp8, flat(whole), weights, bias_of).outputs;
  std::vector<int64_t> shape = whole.sizes().vec();
  for (at::Tensor& output : outputs) {
    shape.back() = output.size(1);
    output = at::_unsafe_view(output, shape);
  }
  return outputs;
}

variable_list products(const LinearsCall& call, const at::Tensor& x,
                       at::TensorList weights, at::TensorList biases) {
  const at::Tensor whole = whole_input(call, x);
  // A product of matrices adds the bias by itself, whatever the dims were. The
  // result may be written in place, which a view would not.
  const at::Tensor input = flat(whole);
  std::vector<int64_t> shape = whole.sizes().vec();
  variable_list outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    shape.back() = weights[i].size(0);
    outputs.push_back(at::_unsafe_view(
        at::linear(input, weights[i], bias_of(call, i, biases)), shape));
  }
  return outputs;
}

// Multiplies a piece while the next ones are on their way.
variable_list products_by_piece(const LinearsCall& call, const at::Tensor& x,
                                at::TensorList weights, at::TensorList biases) {
  GatherOfPieces gather(*call.group, x, kGatheredLinears);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[1] = call.group->size();
  variable_list outputs;
  for (const at::Tensor& weight : weights) {
    shape.back() = weight.size(0);
    outputs.push_back(x.new_empty(shape));
  }
  for (int64_t piece = 0; piece < x.size(0); ++piece) {
    const at::Tensor input = flat(gather.take(piece));
    for (size_t i = 0; i < weights.size(); ++i) {
      at::Tensor output = flat(outputs[i][piece]);
      const auto bias = bias_of(call, i, biases);
      if (bias) {
        at::addmm_out(output, *bias, input, weights[i].t());
      } else {
        at::mm_out(output, input, weights[i].t());
      }
    }
  }
  return outputs;
}

// Returns gradients as matrices whose rows lie one after the other, since each
// is read by several products.
variable_list contiguous(const variable_list& grads) {
  variable_list result = with_data(grads);
  for (at::Tensor& grad : result) {
    if (grad.defined()) grad = grad.contiguous();
  }
  return result;
}

struct GatheredLinears : torch::autograd::Function<GatheredLinears> {
  static variable_list forward(AutogradContext* context,
                               const LinearsCall& call, const at::Tensor& x,
                               at::TensorList weights, at::TensorList biases) {
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    variable_list outputs = call.fp8 ? fp8_products(call, x, weights, biases)
                            : call.in_pieces(x)
                                ? products_by_piece(call, x, weights, biases)
                                : products(call, x, weights, biases);
    keep(context, call);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const LinearsCall& call = kept<LinearsCall>(context);
    const AloneScope alone(call.was_alone);
    const variable_list saved = context->get_saved_variables();
    variable_list results;
    {
      at::NoGradGuard no_grad;
      results =
          run_backward(call, Needs(context, call), contiguous(grads), saved);
    }
    return autograd::once(kGatheredLinears, std::move(results), grads);
  }
};

}  // namespace

std::vector<at::Tensor> gathered_linears(
    const GroupPtr& group, const at::Tensor& x,
    const std::vector<at::Tensor>& weights,
    const std::vector<at::Tensor>& biases, std::optional<int64_t> dim,
    const Sizes& sizes, const std::optional<std::string>& fp8) {
  SMP_CHECK_VALUE(!weights.empty() && biases.size() == weights.size(),
                  kGatheredLinears,
                  ": expected one bias (or None) per weight, got ",
                  biases.size(), " for ", weights.size(), " weights");
  SMP_CHECK_VALUE(x.dim() >= 2 && (!dim || (*dim != -1 && *dim < x.dim() - 1)),
                  kGatheredLinears,
                  ": expected an input of two or more dims, gathered "
                  "along any but the last; got shape ",
                  x.sizes());
  LinearsCall call{group, dim,     sizes,       weights.size(),
                   {},    alone(), std::nullopt};
  if (fp8) call.fp8 = fp8_recipe(group, *fp8, nn::SplitFeatures::kOut);
  std::vector<at::Tensor> given_weights;
  std::vector<at::Tensor> given_biases;
  for (size_t i = 0; i < weights.size(); ++i) {
    SMP_CHECK_VALUE(weights[i].dim() == 2 && weights[i].size(1) == x.size(-1),
                    kGatheredLinears, ": expected weights [out, ", x.size(-1),
                    "], got ", weights[i].sizes());
    given_weights.push_back(as_autocast(weights[i]));
    call.bias_of.push_back(
        biases[i].defined() ? static_cast<int>(given_biases.size()) : -1);
    if (!biases[i].defined()) continue;
    given_biases.push_back(as_autocast(biases[i]));
  }
  const at::Tensor input = as_autocast(x);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return GatheredLinears::apply(call, input, at::TensorList(given_weights),
                                at::TensorList(given_biases));
}

}  // namespace smp::tensor_parallel
