
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
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

constexpr const char* kSoftmaxOp = "smp::scaled_masked_softmax";

void check_arguments(const at::Tensor& scores, const OptionalTensor& mask,
                     const OptionalTensor& slopes, bool is_causal,
                     int64_t window, double p) {
  check_floats(kSoftmaxOp, "scores", scores);
  TORCH_CHECK_VALUE(scores.dim() == 4, rank_prefix(), kSoftmaxOp,
                    ": scores must be [batch, heads, queries, keys], got ",
                    "sizes ", scores.sizes());
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, rank_prefix(), kSoftmaxOp,
                    ": the probability of dropout must be in [0, 1], got ", p);
  TORCH_CHECK_VALUE(window >= 0 && (window == 0 || is_causal), rank_prefix(),
                    kSoftmaxOp,
                    ": a window needs causal=True and a size >= 1, got ",
                    window, " with causal=", is_causal ? "True" : "False");
  check_vector(kSoftmaxOp, "slopes", slopes, scores.size(1), scores);
  if (!mask.has_value()) return;
  TORCH_CHECK_VALUE(c10::isFloatingType(mask->scalar_type()), rank_prefix(),
                    kSoftmaxOp,
                    ": the mask is added to the scores, so it must be of ",
                    "a floating type, got ", mask->scalar_type(),
                    "; put 0 where a key is seen and -inf where not");
  bool fits = mask->dim() == 4;
  for (int64_t dim = 0; fits && dim < 4; ++dim) {
    fits = mask->size(dim) == 1 || mask->size(dim) == scores.size(dim);
  }
  TORCH_CHECK_VALUE(fits, rank_prefix(), kSoftmaxOp,
                    ": the mask must have sizes ", scores.sizes(),
                    " or 1 in some dimensions, got ", mask->sizes());
  TORCH_CHECK_VALUE(mask->device() == scores.device(), rank_prefix(),
                    kSoftmaxOp, ": the mask is on ", mask->device(),
                    ", the scores on ", scores.device(), "; move one of them");
}

// Returns the mask in the compute type, keys one after the other, expanded to
// the sizes of the scores.
at::Tensor readable_mask(const OptionalTensor& mask, const at::Tensor& scores) {
  if (!mask.has_value()) return {};
  at::Tensor result = mask->to(compute_type(scores));
  if (result.size(3) != scores.size(3)) {
    result = result
                 .expand({result.size(0), result.size(1), result.size(2),
                          scores.size(3)})
                 .contiguous();
  } else if (result.stride(3) != 1) {
    result = result.contiguous();
  }
  return result.expand(scores.sizes());
}

// Returns y, and the probabilities before dropout; these are empty without
// dropout, when they would equal y.
Pair softmax_forward(const at::Tensor& scores, const OptionalTensor& mask,
                     const OptionalTensor& slopes, double scale, bool is_causal,
                     int64_t window, double p, int64_t seed) {
  check_arguments(scores, mask, slopes, is_causal, window, p);
  const at::Tensor y = new_like(scores);
  const at::Tensor probs =
      p > 0 ? new_like(scores) : at::empty({0}, scores.options());
  if (scores.is_meta() || scores.numel() == 0) return {y, probs};
  const at::Tensor dense = scores.contiguous();
  const at::Tensor added = readable_mask(mask, scores);
  const at::Tensor slope = in_compute_type(slopes, scores);
  kernels::ScaledMaskedSoftmax op;
  op.scores = data_of(dense);
  op.mask = data_of(added);
  op.slopes = data_of(slope);
  op.probs = mutable_data_of(p > 0 ? probs : y);
  op.y = p > 0 ? mutable_data_of(y) : nullptr;
  op.batch_size = scores.size(0);
  op.num_heads = scores.size(1);
  op.num_queries = scores.size(2);
  op.num_keys = scores.size(3);
  if (added.defined()) {
    op.mask_batch_stride = added.stride(0);
    op.mask_head_stride = added.stride(1);
    op.mask_query_stride = added.stride(2);
  }
  op.scale = scale;
  op.is_causal = is_causal;
  op.window = window;
  op.dropout = kernels::make_dropout(p, static_cast<uint64_t>(seed));
  op.dtype = kernel_dtype(scores);
  if (is_accelerator(scores.device())) {
    memory::run_on_device(kSoftmaxOp, scores.device(), [&](void* stream) {
      return kernels::launchers_of(scores.device()).softmax_forward(op, stream);
    });
  } else {
    for_rows(scores.numel() / op.num_keys, op.num_keys,
             [&](int64_t begin, int64_t end) {
               kernels::fused().softmax_forward(op, begin, end);
             });
  }
  return {y, probs};
}

at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& probs,
                            double scale, bool is_causal, int64_t window,
                            double p, int64_t seed) {
  check_floats(kSoftmaxOp, "dy", dy);
  const at::Tensor dscores = new_like(probs);
  if (dy.is_meta() || dy.numel() == 0) return dscores;
  const at::Tensor dense_dy = dy.to(probs.scalar_type()).contiguous();
  const at::Tensor dense_probs = probs.contiguous();
  kernels::ScaledMaskedSoftmaxBackward op;
  op.dy = data_of(dense_dy);
  op.probs = data_of(dense_probs);
  op.dscores = mutable_data_of(dscores);
  op.num_queries = probs.size(2);
  op.num_keys = probs.size(3);
  op.num_rows = probs.numel() / op.num_keys;
  op.scale = scale;
  op.is_causal = is_causal;
  op.window = window;
  op.dropout = kernels::make_dropout(p, static_cast<uint64_t>(seed));
  op.dtype = kernel_dtype(probs);
  if (is_accelerator(dy.device())) {
    memory::run_on_device(kSoftmaxOp, dy.device(), [&](void* stream) {
      return kernels::launchers_of(dy.device()).softmax_backward(op, stream);
    });
  } else {
    for_rows(op.num_rows, op.num_keys, [&](int64_t begin, int64_t end) {
      kernels::fused().softmax_backward(op, begin, end);
    });
  }
  return dscores;
}

class SoftmaxFunction : public torch::autograd::Function<SoftmaxFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            const OptionalTensor& mask,
                            const OptionalTensor& slopes, double scale,
                            bool is_causal, int64_t window, double p,
                            int64_t seed) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::scaled_masked_softmax_forward", "")
            .typed<Pair(const at::Tensor&, const OptionalTensor&,
                        const OptionalTensor&, double, bool, int64_t, double,
                        int64_t)>();
    auto [y, probs] =
        op.call(scores, mask, slopes, scale, is_causal, window, p, seed);
    context->save_for_backward({p > 0 ? probs : y});
    auto& data = context->saved_data;
    data["scale"] = scale;
    data["is_causal"] = is_causal;
    data["window"] = window;
    data["p"] = p;
    data["seed"] = seed;
    return y;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::scaled_masked_softmax_backward", "")
            .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double,
                              bool, int64_t, double, int64_t)>();
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    at::Tensor dscores;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      dscores = op.call(gradients[0], saved[0], data["scale"].toDouble(),
                        data["is_causal"].toBool(), data["window"].toInt(),
                        data["p"].toDouble(), data["seed"].toInt());
    }
    variable_list results = autograd::once(kSoftmaxOp, {dscores}, gradients);
    results.resize(8);
    return results;
  }
};

at::Tensor scaled_masked_softmax(const at::Tensor& scores,
                                 const OptionalTensor& mask,
                                 const OptionalTensor& slopes, double scale,
                                 bool is_causal, int64_t window, double p,
                                 int64_t seed) {
  const auto wants_gradient = [](const OptionalTensor& tensor) {
    return tensor.has_value() && tensor->requires_grad();
  };
  TORCH_CHECK_VALUE(
      !(at::GradMode::is_enabled() &&
        (wants_gradient(mask) || wants_gradient(slopes))),
      rank_prefix(), kSoftmaxOp,
      ": mask and slopes get no gradient, but require one; detach them, or "
      "compute this softmax with the operators of PyTorch");
  return SoftmaxFunction::apply(scores, mask, slopes, scale, is_causal, window,
                                p, seed);
}

}  // namespace

// scaled_masked_softmax: dropout(softmax(scale * scores + mask - slope *
// |query - key|)) over the keys that a query may see, with the gradient of the
// scores. window 0: none.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "scaled_masked_softmax(Tensor scores, Tensor? mask, Tensor? slopes, "
      "float scale, bool is_causal, int window, float p, int seed) -> Tensor",
      &scaled_masked_softmax);
  m.def(
      "scaled_masked_softmax_forward(Tensor scores, Tensor? mask, "
      "Tensor? slopes, float scale, bool is_causal, int window, float p, "
      "int seed) -> (Tensor, Tensor)");
  m.def(
      "scaled_masked_softmax_backward(Tensor dy, Tensor probs, float scale, "
      "bool is_causal, int window, float p, int seed) -> Tensor");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("scaled_masked_softmax_forward", &softmax_forward);
  m.impl("scaled_masked_softmax_backward", &softmax_backward);
})

}  // namespace smp::nn
