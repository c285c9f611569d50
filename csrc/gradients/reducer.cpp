#include "csrc/gradients/reducer.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "csrc/autograd/after_backward.h"
#include "csrc/comm/agreement.h"
#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"

namespace smp::gradients {

namespace {

// Returns lines about all that the ranks must have in common, options first.
std::vector<std::string> lines_of(const std::vector<ParameterRecord>& records,
                                  const Reducer::Options& options) {
  std::vector<std::string> lines = {detail::concat(
      "bucket size ", options.bucket_cap_bytes, ", backward_passes_per_step ",
      options.passes_per_reduction, ", average_grads_across_microbatches ",
      options.average_over_microbatches)};
  if (options.sharding) {
    const Sharding& sharding = *options.sharding;
    lines.push_back(detail::concat(
        sharding.shard->size(), " shards of ",
        sharding.layout == ShardLayout::kEqualCut ? "buckets" : "parameters",
        sharding.every_microbatch ? ", reduced every microbatch" : ""));
  }
  for (const ParameterRecord& record : records) {
    lines.push_back(record.describe());
  }
  return lines;
}

// Returns the parameters after a check that no rank describes them differently.
// Collective.
ReducedParameters agreed(ReducedParameters parameters,
                         const ReductionGroups& groups,
                         const ReducerOptions& options) {
  if (parameters.targets.empty()) parameters.targets = parameters.params;
  check_parameters(parameters, options);
  if (!groups.has_peers()) return parameters;
  const comm::Communicator& dp = *groups.all();
  comm::Communicator& control = groups.control();
  SMP_CHECK_VALUE(!control.is_stream_ordered() && control.size() == dp.size(),
                  "a reducer over ", dp.name(), " (", dp.size(),
                  " ranks), which sums on a device, needs a control group of "
                  "the host with the same ranks, got ",
                  control.name(), " (", control.size(), " ranks)");
  comm::require_equal_lines(control, lines_of(parameters.records, options),
                            options.wait, "parameters to reduce");
  return parameters;
}

GradientCounts::Guess guess_of(const ReducerOptions& options) {
  using Guess = GradientCounts::Guess;
  // Whole buckets have memory anyway, so the first step ends with them.
  if (!options.lends_memory()) return Guess::kNothing;
  if (options.applies() && !options.expects_one_per_microbatch) {
    return Guess::kNothing;  // a wrong guess could not be made good
  }
  return options.expects_one_per_microbatch ? Guess::kOnePerMicrobatch
                                            : Guess::kAsFirst;
}

// Returns the parameters that may get several gradients where one is expected:
// a checkpointed part of a model gives one of its own to a shared parameter.
std::vector<int> unguessed_of(const std::vector<ParameterRecord>& records,
                              const ReducerOptions& options) {
  std::vector<int> shared;
  if (!options.applies()) return shared;
  for (const ParameterRecord& record : records) {
    if (!record.ties.empty()) shared.push_back(record.index);
  }
  return shared;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> params,
                 std::vector<at::Tensor> targets,
                 std::vector<ParameterRecord> records, comm::CommunicatorPtr dp,
                 Options options)
    : options_(std::move(options)),
      groups_(std::move(dp), options_),
      parameters_(
          agreed({std::move(params), std::move(targets), std::move(records)},
                 groups_, options_)),
      buckets_(parameters_, groups_, options_),
      order_([this](int param_idx, const at::Tensor& grad) {
        add(param_idx, grad);
      }),
      counts_(buckets_.bucket_idxs(), buckets_.size(),
              options_.every_microbatch(), guess_of(options_),
              unguessed_of(parameters_.records, options_),
              options_.applies() ? 1 : 0),
      round_(buckets_, groups_, options_),
      late_(parameters_, buckets_, groups_),
      targets_(parameters_, buckets_) {
  hooks_ = std::make_unique<GradientHooks>(
      parameters_.params, [this](int param_idx, const at::Tensor& grad) {
        on_gradient(param_idx, grad);
      });
}

Reducer::~Reducer() = default;

// ---- opening a step ---------------------------------------------------------

void Reducer::begin_step(int num_microbatches, bool may_overlap,
                         bool are_shares) {
  SMP_CHECK_VALUE(num_microbatches >= 1, "a step needs at least one ",
                  "microbatch, got ", num_microbatches);
  SMP_CHECK_VALUE(!options_.applies() || num_microbatches == 1,
                  "gradients are applied as soon as they are summed, which "
                  "needs steps of one microbatch, got ",
                  num_microbatches);
  const Lock lock(mutex_);
  if (phase_ == Phase::kImplicit && implicit_token_.expired()) abandon();
  SMP_CHECK(phase_ == Phase::kIdle,
            phase_ == Phase::kImplicit
                ? "a step was begun inside a backward that runs outside of any "
                  "step; call backward inside the step function"
                : "a step was begun while one is open; steps cannot be nested, "
                  "and a step that failed must be cancelled");
  hooks_->use_current_stream();
  open(num_microbatches, Phase::kOpen, are_shares);
  may_overlap_ = may_overlap;
}

void Reducer::open(int num_microbatches, Phase phase, bool are_shares) {
  SMP_CHECK(!broken_,
            "an earlier reduction of gradients failed half-way; "
            "the process group cannot be used any more, restart the job");
  if (pass_idx_ == 0) {
    for (const auto& bucket : buckets_) bucket->release();
  }
  targets_.begin_pass(pass_idx_ == 0);
  phase_ = phase;
  may_overlap_ = true;
  active_ = any_active_ = false;
  num_applied_ = 0;
  counts_.begin_step(num_microbatches);
  order_.begin(num_microbatches, counts_.per_microbatch());
  round_.begin_first(num_microbatches, is_last_pass(), are_shares);
}

void Reducer::begin_implicit_step() {
  if (phase_ == Phase::kImplicit) abandon();  // that backward has failed
  open(1, Phase::kImplicit, /*are_shares=*/false);
  // The engine drops the callback, and with it the token, if backward fails.
  auto token = std::make_shared<int>(0);
  implicit_token_ = token;
  autograd::call_after_backward(
      [this, token = std::move(token)] { end_step(); });
}

// ---- while gradients come ---------------------------------------------------

void Reducer::on_gradient(int param_idx, const at::Tensor& grad) {
  SMP_CHECK_VALUE(grad.layout() == at::kStrided, "parameter ",
                  parameters_.records[param_idx].name,
                  " got a gradient of layout ", grad.layout(),
                  "; only dense gradients can be reduced, use "
                  "sparse=False");
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  const bool is_stale = phase_ == Phase::kImplicit && implicit_token_.expired();
  if (phase_ == Phase::kIdle || is_stale) begin_implicit_step();
  await_room(param_idx, lock);
  SMP_CHECK(phase_ != Phase::kEnding, "parameter ",
            parameters_.records[param_idx].name,
            " got a gradient while its step was ending");
  const int mb = phase_ == Phase::kImplicit ? 0 : current_task().mb;
  order_.add(param_idx, mb, grad.detach());
  apply_settled(lock);
}

// Waits before a bucket takes memory while two others have some: gradients may
// come faster than their sums leave, and full buckets would pile up. The
// backward waits here only for a while, because the others may need this rank
// before they come so far (where they use other parameters, and their buckets
// leave at the end only). The wait limits memory alone; sums do not depend on
// it.
void Reducer::await_room(int param_idx, Lock& lock) {
  const auto must_wait = [&] {
    return (phase_ == Phase::kOpen || phase_ == Phase::kImplicit) &&
           round_.is_full();
  };
  if (!options_.lends_memory() || !must_wait() ||
      buckets_.of(param_idx).has_memory()) {
    return;
  }
  round_.settle_finished();
  if (must_wait()) {
    const ReductionRound::Waited waited = round_.await_oldest(lock);
    if (must_wait()) round_.settle(waited);
  }
  apply_settled(lock);
}

void Reducer::add(int param_idx, const at::Tensor& grad) {
  using Place = GradientCounts::Place;
  active_ = true;
  round_.note_gradient();
  targets_.note_gradient(param_idx);
  const Place place = counts_.add(param_idx);
  const bool is_limited = may_launch_early();
  // The test is not whether the bucket is on its way. That depends on timing,
  // and the order of the sum, hence its rounding, must not.
  if (is_limited && place == Place::kLate) {
    SMP_CHECK(!options_.applies(), "parameter ",
              parameters_.records[param_idx].name,
              " got a gradient after its update: a part of the model that is "
              "computed again in the backward uses it too, or this step uses "
              "it more often than earlier ones. Set update_in_backward=False");
    late_.add(param_idx, grad);
    return;
  }
  round_.settle_finished();  // its memory may be taken again
  BucketReduction& bucket = buckets_.of(param_idx);
  if (is_limited && place == Place::kLast) {
    bucket.add_last(buckets_.slot_of(param_idx), grad, round_.pass_divisor());
  } else {
    bucket.add(buckets_.slot_of(param_idx), grad);
  }
  launch_complete_buckets();
}

bool Reducer::may_launch_early() const {
  if (!groups_.has_peers()) return options_.applies();
  return options_.overlap && may_overlap_ && reduces();
}

void Reducer::launch_complete_buckets() {
  if (!may_launch_early()) return;
  while (round_.has_next() && counts_.is_complete(round_.next_idx())) {
    round_.launch_next(targets_.used());
    if (phase_ != Phase::kEnding) ++stats_.num_early_buckets;
  }
}

// Applies the buckets that have been summed, in order, and takes their memory
// back.
void Reducer::apply_settled(Lock& lock) {
  if (!options_.applies()) return;
  round_.settle_finished();
  while (num_applied_ < round_.num_settled()) {
    const int bucket_idx = num_applied_++;
    targets_.publish_bucket(bucket_idx, round_.used_anywhere(bucket_idx));
    lock.unlock();
    options_.apply(bucket_idx);
    lock.lock();
    targets_.drop_bucket(bucket_idx);
    buckets_[bucket_idx].release();
  }
}

void Reducer::expect_as_first() {
  if (counts_.expect_as_first()) launch_complete_buckets();
}

// ---- what others see --------------------------------------------------------

bool Reducer::in_step() const {
  const Lock lock(mutex_);
  return phase_ != Phase::kIdle;
}

Reducer::Stats Reducer::stats() const {
  const Lock lock(mutex_);
  Stats stats = stats_;
  stats.num_early_hops = round_.num_early_hops();
  stats.flat_bytes = buckets_.pool().held_bytes();
  stats.peak_flat_bytes = buckets_.pool().peak_bytes();
  return stats;
}

const at::Tensor& Reducer::flat(int bucket_idx) const {
  SMP_CHECK_VALUE(bucket_idx >= 0 && bucket_idx < buckets_.size(),
                  "there is no bucket ", bucket_idx, " of ", buckets_.size());
  return buckets_[bucket_idx].result();
}

}  // namespace smp::gradients
