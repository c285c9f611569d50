#include "csrc/gradients/reducer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/autograd/after_backward.h"
#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"
#include "csrc/gradients/whole_reduction.h"

namespace smp::gradients {

namespace {

// What the ranks must have in common, options first.
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

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> params,
                 std::vector<at::Tensor> targets,
                 std::vector<ParameterRecord> records, comm::CommunicatorPtr dp,
                 Options options)
    : params_(std::move(params)),
      targets_(targets.empty() ? params_ : std::move(targets)),
      records_(std::move(records)),
      dp_(std::move(dp)),
      options_(std::move(options)),
      plan_(plan_buckets(records_, options_.bucket_cap_bytes)),
      order_([this](int param_idx, const at::Tensor& grad) {
        add(param_idx, grad);
      }),
      old_grads_(params_.size()),
      used_(params_.size(), false) {
  check_parameters();
  if (!params_.empty()) device_ = params_.front().device();
  if (has_peers()) {
    SMP_CHECK_VALUE(
        !control().is_stream_ordered() && control().size() == dp_->size(),
        "a reducer over ", dp_->name(), " (", dp_->size(),
        " ranks), which sums on a device, needs a control group of "
        "the host with the same ranks, got ",
        control().name(), " (", control().size(), " ranks)");
    comm::require_equal_lines(control(), lines_of(records_, options_),
                              options_.patience, "parameters to reduce");
  }
  make_buckets();
  hooks_ = std::make_unique<GradientHooks>(
      params_, [this](int param_idx, const at::Tensor& grad) {
        on_gradient(param_idx, grad);
      });
}

Reducer::~Reducer() = default;

void Reducer::check_parameters() const {
  SMP_CHECK_VALUE(options_.passes_per_reduction >= 1,
                  "backward_passes_per_step must be >= 1, got ",
                  options_.passes_per_reduction);
  SMP_CHECK_VALUE(
      params_.size() == records_.size() && targets_.size() == records_.size(),
      "expected one record and target per parameter, got ", records_.size(),
      " records and ", targets_.size(), " targets for ", params_.size(),
      " parameters");
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& param = params_[i];
    const at::Tensor& target = targets_[i];
    const ParameterRecord& record = records_[i];
    SMP_CHECK_VALUE(param.is_leaf() && param.requires_grad(), "parameter ",
                    record.name, " must be a leaf that requires a gradient");
    SMP_CHECK_VALUE(param.sizes() == at::IntArrayRef(record.local_shape()) &&
                        param.scalar_type() == record.dtype,
                    "parameter ", record.name, " has sizes ", param.sizes(),
                    " and dtype ", param.scalar_type(), ", its record says ",
                    record.describe());
    SMP_CHECK_VALUE(param.device() == params_.front().device(), "parameter ",
                    record.name, " is on ", param.device(), ", ",
                    records_.front().name, " on ", params_.front().device(),
                    "; move the model to one device per rank");
    SMP_CHECK_VALUE(record.group == records_.front().group, "parameter ",
                    record.describe(), " is reduced over another group than ",
                    records_.front().describe(),
                    "; a reducer serves one group");
    if (!target.defined()) continue;
    SMP_CHECK_VALUE(target.is_leaf() && target.device() == param.device() &&
                        target.scalar_type() == record.accumulation_dtype,
                    "the target of parameter ", record.name, " has dtype ",
                    target.scalar_type(), " on ", target.device(),
                    "; expected a leaf on ", param.device(), " for ",
                    record.describe());
    SMP_CHECK_VALUE(is_sharded() || target.sizes() == param.sizes(),
                    "the target of parameter ", record.name, " has sizes ",
                    target.sizes(), "; expected ", param.sizes());
  }
}

void Reducer::check_sharding(const std::vector<ShardedBucket>& plan) const {
  const Sharding& sharding = *options_.sharding;
  int size = sharding.shard->size();
  for (const auto& group : sharding.further) size *= group->size();
  SMP_CHECK_VALUE(
      has_peers() && sharding.shard->size() > 1 && size == dp_->size(),
      "the groups of shards have ", size, " ranks together, the ",
      "group over which gradients are reduced has ",
      has_peers() ? dp_->size() : 1);
  for (const ShardedBucket& bucket : plan) {
    for (const ShardHolding& held :
         bucket.holdings[sharding.shard->group_rank()]) {
      const ParameterRecord& record = records_[held.record_idx];
      const at::Tensor& target = targets_[held.record_idx];
      const at::Tensor& param = params_[held.record_idx];
      // A parameter that is let go of shows one element in all places.
      SMP_CHECK_VALUE(
          param.is_contiguous() || !param.is_non_overlapping_and_dense(),
          "parameter ", record.name,
          " is not contiguous and cannot be sharded");
      SMP_CHECK_VALUE(!target.defined() || target.numel() == held.numel ||
                          target.numel() == held.room,
                      "the target of parameter ", record.name, " has ",
                      target.numel(), " elements, this rank holds ", held.numel,
                      " of ", record.describe());
    }
  }
}

void Reducer::make_buckets() {
  const int num_shards = is_sharded() ? options_.sharding->shard->size() : 1;
  const auto layout =
      is_sharded() ? options_.sharding->layout : ShardLayout::kEqualCut;
  const auto plan =
      plan_shards(records_, options_.bucket_cap_bytes, num_shards, layout);
  if (is_sharded()) check_sharding(plan);
  std::vector<at::Tensor> like = params_;
  if (!is_sharded()) {
    for (size_t i = 0; i < like.size(); ++i) {
      if (targets_[i].defined()) like[i] = targets_[i];
    }
  }
  for (const ShardedBucket& bucket : plan) {
    if (is_sharded()) {
      buckets_.push_back(std::make_unique<ShardReduction>(
          bucket, like, device_, *options_.sharding, pool_));
    } else {
      buckets_.push_back(
          std::make_unique<WholeReduction>(bucket, like, device_, dp_));
    }
  }
}

double Reducer::pass_divisor() const {
  return options_.average_over_microbatches ? num_microbatches_ : 1;
}

comm::Communicator& Reducer::first_group() const {
  return is_sharded() ? *options_.sharding->shard : *dp_;
}

BucketReduction& Reducer::bucket_of(int param_idx) const {
  return *buckets_[plan_.places[param_idx].bucket_idx];
}

// ---- opening a step ---------------------------------------------------------

void Reducer::begin_step(int num_microbatches, bool may_overlap) {
  SMP_CHECK_VALUE(num_microbatches >= 1, "a step needs at least one ",
                  "microbatch, got ", num_microbatches);
  const Lock lock(mutex_);
  if (phase_ == Phase::kImplicit && implicit_token_.expired()) abandon();
  SMP_CHECK(phase_ == Phase::kIdle,
            phase_ == Phase::kImplicit
                ? "a step was begun inside a backward that runs outside of any "
                  "step; call backward inside the step function"
                : "a step was begun while one is open; steps cannot be nested, "
                  "and a step that failed must be cancelled");
  open(num_microbatches, Phase::kOpen);
  may_overlap_ = may_overlap;
}

void Reducer::open(int num_microbatches, Phase phase) {
  SMP_CHECK(!broken_,
            "an earlier reduction of gradients failed half-way; "
            "the process group cannot be used any more, restart the job");
  if (pass_idx_ == 0) {
    for (const auto& bucket : buckets_) bucket->let_go();
  }
  keep_old_grads();
  phase_ = phase;
  num_microbatches_ = num_microbatches;
  may_overlap_ = true;
  active_ = any_active_ = false;
  round_idx_ = 0;
  most_added_.assign(params_.size(), 0);
  const auto learned = learned_.find(num_microbatches);
  const bool is_known = learned != learned_.end();
  order_.begin(num_microbatches, is_known ? learned->second.per_microbatch
                                          : std::vector<int>(params_.size()));
  expected_ = is_known ? &learned->second.most : nullptr;
  // Else all buckets would be whole at the end of the first step. A wrong
  // guess is as one that was learnt.
  learns_from_first_ = !is_known && is_sharded();
  if (learns_from_first_ && options_.expects_one_per_microbatch) {
    learns_from_first_ = false;
    guess_.assign(params_.size(), every_microbatch() ? 1 : num_microbatches);
    expected_ = &guess_;
  }
  begin_round();
}

void Reducer::keep_old_grads() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& target = targets_[i];
    const at::Tensor grad = target.defined() ? target.grad() : at::Tensor();
    BucketReduction& bucket = bucket_of(static_cast<int>(i));
    if (pass_idx_ > 0 &&
        (!target.defined() ||
         (grad.defined() && (used_[i] || old_grads_[i].defined())))) {
      continue;  // what the earlier passes left there
    }
    // New, or set to None by the user: begin from what is there now.
    used_[i] = false;
    bucket.drop_passes(slot_of(static_cast<int>(i)));
    old_grads_[i] = at::Tensor();
    if (!grad.defined()) continue;
    const at::Tensor& result = bucket.result();
    const bool is_ours = result.defined() && grad.is_alias_of(result);
    old_grads_[i] = is_ours ? grad.detach().clone() : grad.detach();
  }
}

// ---- while gradients come ---------------------------------------------------

void Reducer::on_gradient(int param_idx, const at::Tensor& grad) {
  SMP_CHECK_VALUE(grad.layout() == at::kStrided, "parameter ",
                  records_[param_idx].name, " got a gradient of layout ",
                  grad.layout(),
                  "; only dense gradients can be reduced, use "
                  "sparse=False");
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  const bool is_stale = phase_ == Phase::kImplicit && implicit_token_.expired();
  if (phase_ == Phase::kIdle || is_stale) begin_implicit_step();
  await_room(param_idx, lock);
  SMP_CHECK(phase_ != Phase::kEnding, "parameter ", records_[param_idx].name,
            " got a gradient while its step was ending");
  const int mb = phase_ == Phase::kImplicit ? 0 : current_task().mb;
  order_.add(param_idx, mb, grad.detach());
}

void Reducer::begin_implicit_step() {
  if (phase_ == Phase::kImplicit) abandon();  // that backward has failed
  open(1, Phase::kImplicit);
  // The engine drops the callback, and with it the token, if backward fails.
  auto token = std::make_shared<int>(0);
  implicit_token_ = token;
  autograd::call_after_backward(
      [this, token = std::move(token)] { end_step(); });
}

void Reducer::add(int param_idx, const at::Tensor& grad) {
  const SlotPlace place = plan_.places[param_idx];
  active_ = round_active_ = true;
  used_[param_idx] = true;
  const int num_added = ++num_added_[param_idx];
  most_added_[param_idx] = std::max(most_added_[param_idx], num_added);
  // Not "is its bucket on its way": that is a matter of timing, and the order
  // of the sum, hence its rounding, must not be.
  const int num_expected = expected_ == nullptr ? -1 : (*expected_)[param_idx];
  const bool is_limited = may_launch_early() && expected_ != nullptr;
  if (is_limited && num_added > num_expected) {
    late_[param_idx].push_back(grad);
    return;
  }
  settle_finished();  // its memory may be taken again
  BucketReduction& bucket = *buckets_[place.bucket_idx];
  if (is_limited && num_added == num_expected) {
    bucket.add_last(place.slot_idx, grad, pass_divisor());
  } else {
    bucket.add(place.slot_idx, grad);
  }
  if (expected_ == nullptr) return;
  if (num_added == num_expected) --num_missing_[place.bucket_idx];
  launch_complete_buckets();
}

// ---- what others see --------------------------------------------------------

bool Reducer::in_step() const {
  const Lock lock(mutex_);
  return phase_ != Phase::kIdle;
}

Reducer::Stats Reducer::stats() const {
  const Lock lock(mutex_);
  Stats stats = stats_;
  stats.flat_bytes = pool_.held_bytes();
  stats.peak_flat_bytes = pool_.peak_bytes();
  return stats;
}

const at::Tensor& Reducer::flat(int bucket_idx) const {
  SMP_CHECK_VALUE(
      bucket_idx >= 0 && bucket_idx < static_cast<int>(buckets_.size()),
      "there is no bucket ", bucket_idx, " of ", buckets_.size());
  return buckets_[bucket_idx]->result();
}

}  // namespace smp::gradients
