#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/tensor_parallel/once.h"
#include "csrc/tensor_parallel/region_call.h"
#include "csrc/tensor_parallel/vocabulary.h"

namespace smp::tensor_parallel {
namespace {

using comm::ReduceOp;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "vocabulary_cross_entropy";
// Of a temporary on the host: stays in the cache.
constexpr int64_t kChunkNumel = 1 << 16;

struct Call {
  GroupPtr group;
  at::Tensor targets;
  CrossEntropyOptions options;
};

// Where each target is, as far as this rank has it.
struct Places {
  Places(const Call& call, int64_t num_entries)
      : ignored(call.targets.eq(call.options.ignore_index)),
        elsewhere(
            call.targets.lt(call.options.begin)
                .logical_or_(call.targets.ge(call.options.begin + num_entries))
                .logical_or_(ignored)),
        columns(call.targets.sub(call.options.begin)
                    .masked_fill_(elsewhere, 0)
                    .unsqueeze(1)) {}

  at::Tensor ignored;
  at::Tensor elsewhere;
  at::Tensor columns;  // [tokens, 1]; 0 where the target is elsewhere
};

// Calls `body(begin, count)` for a few rows at a time.
template <typename Body>
void for_chunks(const at::Tensor& logits, Body body) {
  const int64_t num_tokens = logits.size(0);
  const bool is_on_host = logits.is_cpu() && !has_no_data(logits);
  const int64_t step = is_on_host
                           ? std::max<int64_t>(1, kChunkNumel / logits.size(1))
                           : std::max<int64_t>(1, num_tokens);
  for (int64_t begin = 0; begin < num_tokens; begin += step) {
    body(begin, std::min(step, num_tokens - begin));
  }
}

at::ScalarType wide_dtype(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor all_reduced(const Call& call, const at::Tensor& x, ReduceOp op) {
  return call.group->begin_all_reduce(x, op, kName, /*may_overwrite=*/true)
      .take();
}

void check_targets(const at::Tensor& targets,
                   const CrossEntropyOptions& options) {
  // Reading them would stall a device.
  if (!targets.is_cpu() || has_no_data(targets)) return;
  const at::Tensor bad = targets.lt(0)
                             .logical_or_(targets.ge(options.vocab_size))
                             .logical_and_(targets.ne(options.ignore_index));
  SMP_CHECK_VALUE(!bad.any().item<bool>(), kName, ": target ",
                  targets.masked_select(bad)[0].item<int64_t>(),
                  " is out of bounds: expected 0 to ", options.vocab_size - 1,
                  " or ignore_index, ", options.ignore_index);
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const Call& call,
                            const at::Tensor& logits) {
    const at::ScalarType wide = wide_dtype(logits);
    const double smoothing = call.options.label_smoothing;
    const Places places(call, logits.size(1));
    const at::Tensor maxima =
        all_reduced(call, logits.amax(1).to(wide), ReduceOp::kMax);

    // Rows: sum of exponentials, logit of the target, sum of logits.
    at::Tensor sums = maxima.new_zeros({smoothing > 0 ? 3 : 2, logits.size(0)});
    at::Tensor exp_sums = sums.select(0, 0);
    for_chunks(logits, [&](int64_t begin, int64_t count) {
      at::Tensor shifted =
          logits.narrow(0, begin, count)
              .to(wide)
              .sub(maxima.narrow(0, begin, count).unsqueeze(1));
      if (smoothing > 0) {
        sums.select(0, 2).narrow(0, begin, count).copy_(shifted.sum(1));
      }
      exp_sums.narrow(0, begin, count).copy_(shifted.exp_().sum(1));
    });
    sums.select(0, 1).copy_(logits.gather(1, places.columns)
                                .squeeze(1)
                                .to(wide)
                                .sub_(maxima)
                                .masked_fill_(places.elsewhere, 0));
    sums = all_reduced(call, sums, ReduceOp::kSum);

    const at::Tensor log_sums = sums.select(0, 0).log();
    at::Tensor losses = log_sums.sub(sums.select(0, 1), 1 - smoothing);
    if (smoothing > 0) {
      losses.sub_(sums.select(0, 2),
                  smoothing / static_cast<double>(call.options.vocab_size));
    }
    keep(context, call);
    context->save_for_backward({logits, log_sums.add(maxima)});
    return losses.masked_fill_(places.ignored, 0);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const Call& call = kept<Call>(context);
    const variable_list saved = context->get_saved_variables();
    at::Tensor d_logits;
    {
      at::NoGradGuard no_grad;
      d_logits = run_backward(call, with_data(grads[0]), saved[0], saved[1]);
    }
    return only_once(kName, {at::Tensor(), std::move(d_logits)}, grads);
  }

 private:
  static at::Tensor run_backward(const Call& call, const at::Tensor& grad,
                                 const at::Tensor& logits,
                                 const at::Tensor& log_exp_sums) {
    const at::ScalarType wide = wide_dtype(logits);
    const double smoothing = call.options.label_smoothing;
    const Places places(call, logits.size(1));
    const at::Tensor factors = grad.masked_fill(places.ignored, 0).unsqueeze(1);
    const at::Tensor target_parts =
        factors.mul(smoothing - 1)
            .masked_fill_(places.elsewhere.unsqueeze(1), 0);
    at::Tensor d_logits = at::empty_like(logits, at::MemoryFormat::Contiguous);
    for_chunks(logits, [&](int64_t begin, int64_t count) {
      const auto part = [&](const at::Tensor& whole) {
        return whole.narrow(0, begin, count);
      };
      at::Tensor to = part(d_logits);
      at::Tensor chunk =
          wide == logits.scalar_type()
              ? to
              : to.new_empty(to.sizes(), to.options().dtype(wide));
      at::sub_out(chunk, part(logits), part(log_exp_sums).unsqueeze(1));
      chunk.exp_().mul_(part(factors));
      if (smoothing > 0) {
        chunk.sub_(part(factors),
                   smoothing / static_cast<double>(call.options.vocab_size));
      }
      chunk.scatter_add_(1, part(places.columns), part(target_parts));
      if (!chunk.is_same(to)) to.copy_(chunk);
    });
    return d_logits;
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
      kName, ": expected logits [tokens, entries] and int64 targets [tokens], ",
      "got ", logits.scalar_type(), logits.sizes(), " and ",
      targets.scalar_type(), targets.sizes());
  SMP_CHECK_VALUE(options.begin >= 0 &&
                      options.begin + logits.size(1) <= options.vocab_size,
                  kName, ": entries ", options.begin, " to ",
                  options.begin + logits.size(1),
                  " are not within the vocabulary of ", options.vocab_size);
  SMP_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                  kName, ": expected label_smoothing in [0, 1], got ",
                  options.label_smoothing);
  check_targets(targets, options);
  return CrossEntropy::apply(Call{group, targets, options}, logits);
}

}  // namespace smp::tensor_parallel
