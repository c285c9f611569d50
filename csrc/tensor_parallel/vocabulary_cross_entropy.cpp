#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/region_call.h"
#include "csrc/tensor_parallel/vocabulary.h"

namespace smp::tensor_parallel {
namespace {

using comm::ReduceOp;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kVocabularyCrossEntropy = "vocabulary_cross_entropy";

using Statistics = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t,
                              int64_t, int64_t, bool);
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, int64_t, int64_t, int64_t,
                            double);

// Returns a piece of the fused operator in csrc/nn/cross_entropy.cpp.
template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

struct CrossEntropyCall {
  GroupPtr group;
  at::Tensor targets;
  CrossEntropyOptions options;
};

at::Tensor all_reduced(const CrossEntropyCall& call, const at::Tensor& x,
                       ReduceOp op) {
  return call.group
      ->begin_all_reduce(x, op, kVocabularyCrossEntropy, /*may_overwrite=*/true)
      .take();
}

void check_targets(const at::Tensor& targets,
                   const CrossEntropyOptions& options) {
  // Reading the targets would stall a device.
  if (!targets.is_cpu() || has_no_data(targets)) return;
  const at::Tensor bad = targets.lt(0)
                             .logical_or_(targets.ge(options.vocab_size))
                             .logical_and_(targets.ne(options.ignore_index));
  SMP_CHECK_VALUE(!bad.any().item<bool>(), kVocabularyCrossEntropy, ": target ",
                  targets.masked_select(bad)[0].item<int64_t>(),
                  " is out of bounds: expected 0 to ", options.vocab_size - 1,
                  " or ignore_index, ", options.ignore_index);
}

// Returns whether each target is an entry of this rank.
at::Tensor are_here(const CrossEntropyCall& call, int64_t num_entries) {
  return call.targets.ge(call.options.begin)
      .logical_and_(call.targets.lt(call.options.begin + num_entries));
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context,
                            const CrossEntropyCall& call,
                            const at::Tensor& logits) {
    static const auto statistics =
        operator_of<Statistics>("smp::cross_entropy_statistics");
    const CrossEntropyOptions& options = call.options;
    const bool is_smoothed = options.label_smoothing > 0;
    at::AutoDispatchBelowADInplaceOrView below;
    // Rows: the maximum; relative to it the sum of exponentials, the logit of
    // the target (0 if it is elsewhere) and, if smoothed, the sum of all
    // logits.
    at::Tensor rows =
        statistics.call(logits, call.targets, options.begin, options.vocab_size,
                        options.ignore_index, is_smoothed);
    const at::Tensor maxima =
        all_reduced(call, rows.select(0, 0).clone(), ReduceOp::kMax);
    const at::Tensor shifts = rows.select(0, 0).sub(maxima);
    at::Tensor sums = rows.narrow(0, 1, is_smoothed ? 3 : 2).contiguous();
    sums.select(0, 0).mul_(shifts.exp());
    sums.select(0, 1).add_(shifts.mul(are_here(call, logits.size(1))));
    if (is_smoothed) sums.select(0, 2).add_(shifts, logits.size(1));
    sums = all_reduced(call, sums, ReduceOp::kSum);

    at::Tensor losses = sums.select(0, 0).log().sub_(
        sums.select(0, 1), 1 - options.label_smoothing);
    if (is_smoothed) {
      losses.sub_(
          sums.select(0, 2),
          options.label_smoothing / static_cast<double>(options.vocab_size));
    }
    keep(context, call);
    context->save_for_backward({logits, maxima, sums.select(0, 0)});
    return losses.masked_fill_(call.targets.eq(options.ignore_index), 0);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto backward_of =
        operator_of<Backward>("smp::cross_entropy_backward");
    const CrossEntropyCall& call = kept<CrossEntropyCall>(context);
    const variable_list saved = context->get_saved_variables();
    at::Tensor d_logits;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      d_logits = backward_of.call(
          with_data(grads[0]), saved[0], call.targets, saved[1], saved[2],
          call.options.begin, call.options.vocab_size,
          call.options.ignore_index, call.options.label_smoothing);
    }
    return autograd::once(kVocabularyCrossEntropy,
                          {at::Tensor(), std::move(d_logits)}, grads);
  }
};

}  // namespace

at::Tensor vocabulary_cross_entropy(const GroupPtr& group,
                                    const at::Tensor& logits,
                                    const at::Tensor& targets,
                                    const CrossEntropyOptions& options) {
  SMP_CHECK_VALUE(
      logits.dim() == 2 && targets.dim() == 1 &&
          targets.size(0) == logits.size(0) && logits.size(1) > 0 &&
          logits.is_floating_point() && targets.scalar_type() == at::kLong,
      kVocabularyCrossEntropy,
      ": expected logits [tokens, entries] and int64 targets [tokens], ",
      "got ", logits.scalar_type(), logits.sizes(), " and ",
      targets.scalar_type(), targets.sizes());
  SMP_CHECK_VALUE(options.begin >= 0 &&
                      options.begin + logits.size(1) <= options.vocab_size,
                  kVocabularyCrossEntropy, ": entries ", options.begin, " to ",
                  options.begin + logits.size(1),
                  " are not within the vocabulary of ", options.vocab_size);
  SMP_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                  kVocabularyCrossEntropy,
                  ": expected label_smoothing in [0, 1], got ",
                  options.label_smoothing);
  check_targets(targets, options);
  return CrossEntropy::apply(CrossEntropyCall{group, targets, options}, logits);
}

}  // namespace smp::tensor_parallel
