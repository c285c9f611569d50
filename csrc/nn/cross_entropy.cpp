#include <ATen/TensorOperators.h>
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

constexpr const char* kCrossEntropyOp = "smp::cross_entropy";

void check_logits(const at::Tensor& logits, const at::Tensor& targets) {
  check_floats(kCrossEntropyOp, "logits", logits);
  TORCH_CHECK_VALUE(
      logits.dim() == 2 && targets.dim() == 1 &&
          targets.size(0) == logits.size(0) &&
          targets.scalar_type() == at::kLong,
      rank_prefix(), kCrossEntropyOp,
      ": expected logits [tokens, vocabulary] and int64 targets [tokens], got ",
      logits.sizes(), " and ", targets.scalar_type(), " ", targets.sizes());
  TORCH_CHECK_VALUE(targets.device() == logits.device(), rank_prefix(),
                    kCrossEntropyOp, ": targets are on ", targets.device(),
                    ", logits on ", logits.device(), "; move one of them");
}

// Checks targets on the CPU. On a GPU the host would have to wait; there bad
// targets give NaN.
void check_targets(const at::Tensor& targets, int64_t vocab_size,
                   int64_t ignore_index) {
  const int64_t* data = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    TORCH_CHECK_INDEX(
        (data[i] >= 0 && data[i] < vocab_size) || data[i] == ignore_index,
        rank_prefix(), kCrossEntropyOp, ": target ", data[i], " of token ", i,
        " is not in [0, ", vocab_size,
        ") and is not ignore_index = ", ignore_index);
  }
}

// Returns rows with any stride whose elements lie together.
at::Tensor readable_rows(const at::Tensor& logits) {
  return logits.stride(1) == 1 || logits.size(1) == 1 ? logits
                                                      : logits.contiguous();
}

// Returns [3, tokens]: maximum, sum of exponentials, logit of the target; the
// last two relative to the maximum. With `wants_sum` [4, tokens]: also the sum
// of the logits. See kernels::CrossEntropy.
at::Tensor statistics(const at::Tensor& logits, const at::Tensor& targets,
                      int64_t first_column, int64_t vocab_size,
                      int64_t ignore_index, bool wants_sum) {
  check_logits(logits, targets);
  const int64_t num_rows = logits.size(0);
  const at::Tensor result =
      new_tensor({wants_sum ? 4 : 3, num_rows}, compute_type(logits), logits);
  if (logits.is_meta() || num_rows == 0) return result;
  const at::Tensor numbers = targets.contiguous();
  if (logits.is_cpu()) check_targets(numbers, vocab_size, ignore_index);
  const at::Tensor source = readable_rows(logits);
  const auto row = [&](int64_t which) {
    return static_cast<void*>(static_cast<char*>(result.mutable_data_ptr()) +
                              which * num_rows *
                                  static_cast<int64_t>(result.element_size()));
  };
  const kernels::CrossEntropy op = {data_of(source),
                                    numbers.const_data_ptr<int64_t>(),
                                    row(0),
                                    row(1),
                                    row(2),
                                    wants_sum ? row(3) : nullptr,
                                    num_rows,
                                    logits.size(1),
                                    source.stride(0),
                                    first_column,
                                    vocab_size,
                                    ignore_index,
                                    kernel_dtype(logits)};
  if (is_accelerator(logits.device())) {
    memory::run_on_device(kCrossEntropyOp, logits.device(), [&](void* stream) {
      return kernels::launchers_of(logits.device())
          .cross_entropy_forward(op, stream);
    });
  } else {
    for_rows(num_rows, logits.size(1), [&](int64_t begin, int64_t end) {
      kernels::fused().cross_entropy_forward(op, begin, end);
    });
  }
  return result;
}

void write_gradient(const at::Tensor& dloss, const at::Tensor& logits,
                    const at::Tensor& targets, const at::Tensor& max,
                    const at::Tensor& exp_sum, int64_t first_column,
                    int64_t vocab_size, int64_t ignore_index,
                    double label_smoothing, const at::Tensor& dlogits) {
  check_logits(logits, targets);
  if (logits.is_meta() || logits.numel() == 0) return;
  const at::Tensor source = readable_rows(logits);
  const at::Tensor numbers = targets.contiguous();
  const at::Tensor dlosses = in_compute_type(dloss, logits);
  const at::Tensor maxima = in_compute_type(max, logits);
  const at::Tensor sums = in_compute_type(exp_sum, logits);
  const kernels::CrossEntropyBackward op = {
      data_of(dlosses), data_of(source),     numbers.const_data_ptr<int64_t>(),
      data_of(maxima),  data_of(sums),       mutable_data_of(dlogits),
      logits.size(0),   logits.size(1),      source.stride(0),
      first_column,     ignore_index,        vocab_size,
      label_smoothing,  kernel_dtype(logits)};
  if (is_accelerator(logits.device())) {
    memory::run_on_device(kCrossEntropyOp, logits.device(), [&](void* stream) {
      return kernels::launchers_of(logits.device())
          .cross_entropy_backward(op, stream);
    });
  } else {
    for_rows(logits.size(0), logits.size(1), [&](int64_t begin, int64_t end) {
      kernels::fused().cross_entropy_backward(op, begin, end);
    });
  }
}

at::Tensor cross_entropy_backward(
    const at::Tensor& dloss, const at::Tensor& logits,
    const at::Tensor& targets, const at::Tensor& max, const at::Tensor& exp_sum,
    int64_t first_column, int64_t vocab_size, int64_t ignore_index,
    double label_smoothing) {
  const at::Tensor dlogits = new_like(logits);
  write_gradient(dloss, logits, targets, max, exp_sum, first_column, vocab_size,
                 ignore_index, label_smoothing, dlogits);
  return dlogits;
}

void cross_entropy_backward_(const at::Tensor& dloss, const at::Tensor& logits,
                             const at::Tensor& targets, const at::Tensor& max,
                             const at::Tensor& exp_sum, int64_t first_column,
                             int64_t vocab_size, int64_t ignore_index,
                             double label_smoothing) {
  TORCH_CHECK_VALUE(logits.is_contiguous(), rank_prefix(), kCrossEntropyOp,
                    ": a gradient can take the place of contiguous logits "
                    "only, got strides ",
                    logits.strides());
  write_gradient(dloss, logits, targets, max, exp_sum, first_column, vocab_size,
                 ignore_index, label_smoothing, logits);
}

using Statistics = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t,
                              int64_t, int64_t, bool);
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, int64_t, int64_t, int64_t,
                            double);

class CrossEntropyFunction
    : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, int64_t ignore_index,
                            double label_smoothing) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::cross_entropy_statistics", "")
            .typed<Statistics>();
    const bool is_smoothed = label_smoothing != 0;
    const int64_t vocab_size = logits.size(-1);
    const at::Tensor rows =
        op.call(logits, targets, 0, vocab_size, ignore_index, is_smoothed);
    at::Tensor loss =
        rows.select(0, 1).log().sub_(rows.select(0, 2), 1 - label_smoothing);
    if (is_smoothed) {
      loss.sub_(rows.select(0, 3),
                label_smoothing / static_cast<double>(vocab_size));
    }
    loss.masked_fill_(targets == ignore_index, 0);
    context->save_for_backward(
        {logits, targets, rows.select(0, 0), rows.select(0, 1)});
    context->saved_data["ignore_index"] = ignore_index;
    context->saved_data["label_smoothing"] = label_smoothing;
    return loss;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("smp::cross_entropy_backward", "")
            .typed<Backward>();
    const variable_list saved = context->get_saved_variables();
    at::Tensor dlogits;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      dlogits = op.call(gradients[0], saved[0], saved[1], saved[2], saved[3], 0,
                        saved[0].size(-1),
                        context->saved_data["ignore_index"].toInt(),
                        context->saved_data["label_smoothing"].toDouble());
    }
    variable_list results =
        autograd::once(kCrossEntropyOp, {dlogits}, gradients);
    results.resize(4);
    return results;
  }
};

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         int64_t ignore_index, double label_smoothing) {
  check_logits(logits, targets);
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, rank_prefix(),
                    kCrossEntropyOp,
                    ": label_smoothing must be in [0, 1], got ",
                    label_smoothing);
  return CrossEntropyFunction::apply(logits, targets, ignore_index,
                                     label_smoothing);
}

}  // namespace

// cross_entropy: the loss of each token, 0 where it is to be ignored, with the
// gradient of the logits. The other operators are its pieces for logits that
// are spread over ranks: statistics of the columns from first_column on, and
// the gradient from the maximum and the sum of exponentials of the whole row;
// cross_entropy_backward_ writes it over the logits.
TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "cross_entropy(Tensor logits, Tensor targets, int ignore_index, "
      "float label_smoothing) -> Tensor",
      &cross_entropy);
  m.def(
      "cross_entropy_statistics(Tensor logits, Tensor targets, "
      "int first_column, int vocab_size, int ignore_index, bool wants_sum) -> "
      "Tensor");
  m.def(
      "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor targets, "
      "Tensor max, Tensor exp_sum, int first_column, int vocab_size, "
      "int ignore_index, float label_smoothing) -> Tensor");
  m.def(
      "cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, "
      "Tensor targets, Tensor max, Tensor exp_sum, int first_column, "
      "int vocab_size, int ignore_index, float label_smoothing) -> ()");
}

SMP_IMPL_ON_ALL_DEVICES(m, {
  m.impl("cross_entropy_statistics", &statistics);
  m.impl("cross_entropy_backward", &cross_entropy_backward);
  m.impl("cross_entropy_backward_", &cross_entropy_backward_);
})

}  // namespace smp::nn
