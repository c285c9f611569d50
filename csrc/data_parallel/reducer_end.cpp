// The end of a step: agreement, reduction, and what becomes `.grad`.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/data_parallel/reducer.h"

namespace smp::data_parallel {

void Reducer::end_step() {
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  SMP_CHECK(phase_ == Phase::kOpen || phase_ == Phase::kImplicit,
            "a step was ended, but none is open");
  phase_ = Phase::kEnding;
  try {
    close(lock);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    abandon();
    throw;
  }
}

void Reducer::cancel_step() {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  if (phase_ != Phase::kIdle) abandon();
}

// Gradients of the step are lost; those from before it come back.
void Reducer::abandon() {
  // Operations in flight still write to the buckets.
  broken_ = broken_ || header_work_ != nullptr;
  header_work_ = nullptr;
  works_.clear();
  late_.clear();
  phase_ = Phase::kIdle;
  order_.begin(0, {});
  if (!active_) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (used_[i]) params_[i].mutable_grad() = old_grads_[i];
  }
  for (FlatBucket& bucket : buckets_) bucket.drop_passes();
  pass_idx_ = 0;
}

void Reducer::close(Lock& lock) {
  order_.finish_all();
  if (any_rank_active(lock)) {
    if (is_last_pass()) {
      reduce(lock);
    } else {
      for (FlatBucket& bucket : buckets_) bucket.keep_pass(pass_divisor());
      publish(used_);
      ++pass_idx_;
    }
    learn_counts();
  } else if (pass_idx_ == 0) {
    forget_old_grads();
  }
  header_work_ = nullptr;
  phase_ = Phase::kIdle;
  order_.begin(0, {});
}

bool Reducer::any_rank_active(Lock& lock) {
  if (!has_peers()) return active_;
  launch_header();
  lock.unlock();
  wait_for(*header_work_, options_.patience, *dp_, "begin of the reduction");
  const at::Tensor header = header_.cpu();
  lock.lock();
  return *header.const_data_ptr<int64_t>() != 0;
}

void Reducer::reduce(Lock& lock) {
  std::vector<bool> used = used_;
  if (has_peers()) {
    used = reduce_over_ranks(lock);
  } else {
    for (FlatBucket& bucket : buckets_) bucket.finish(pass_divisor());
  }
  publish(used);
  ++stats_.num_reductions;
  pass_idx_ = 0;
  for (FlatBucket& bucket : buckets_) bucket.drop_passes();
  forget_old_grads();
}

// Returns which parameters some rank has used. `works_` does not change while
// the lock is not held, because no gradient is accepted any more.
std::vector<bool> Reducer::reduce_over_ranks(Lock& lock) {
  while (works_.size() < buckets_.size()) launch_bucket();
  std::vector<int64_t> flags(used_.begin(), used_.end());
  const size_t num_params = params_.size();
  flags.resize(2 * num_params, 0);
  for (const auto& [param_idx, grads] : late_) {
    flags[num_params + param_idx] = 1;
  }
  lock.unlock();
  flags = agree_on_maxima(*dp_, flags, device_, options_.patience,
                          "exchange of used parameters");
  for (size_t b = 0; b < works_.size(); ++b) {
    wait_for(*works_[b], options_.patience, *dp_,
             detail::concat("reduction of bucket ", b, " of ", works_.size()));
  }
  const std::vector<bool> late(flags.begin() + num_params, flags.end());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    reduce_late(static_cast<int>(b), late);
  }
  lock.lock();
  stats_.num_late_parameters += static_cast<int64_t>(late_.size());
  works_.clear();
  late_.clear();
  return {flags.begin(), flags.begin() + num_params};
}

// The second round of one bucket: what came after it had been launched, here or
// on another rank.
void Reducer::reduce_late(int bucket_idx, const std::vector<bool>& late) {
  const FlatBucket& bucket = buckets_[bucket_idx];
  std::vector<BucketSlot> slots;  // packed without gaps
  int64_t numel = 0;
  for (const BucketSlot& slot : plan_.buckets[bucket_idx].slots) {
    if (!late[slot.record_idx]) continue;
    slots.push_back({slot.record_idx, numel, slot.numel});
    numel += slot.numel;
  }
  if (slots.empty()) return;
  at::Tensor sum = at::zeros({numel}, bucket.flat().options());
  auto part = [&](const BucketSlot& slot) {
    return sum.narrow(0, slot.offset, slot.numel)
        .view(params_[slot.record_idx].sizes());
  };
  for (const BucketSlot& slot : slots) {
    const auto grads = late_.find(slot.record_idx);
    if (grads == late_.end()) continue;
    for (const at::Tensor& grad : grads->second) part(slot).add_(grad);
  }
  bucket.scale_late(sum, pass_divisor());
  wait_for(
      *dp_->all_reduce(sum, comm::ReduceOp::kSum), options_.patience, *dp_,
      detail::concat("reduction of late gradients of bucket ", bucket_idx));
  for (const BucketSlot& slot : slots) {
    bucket.view(slot_of(slot.record_idx)).add_(part(slot));
  }
}

void Reducer::publish(const std::vector<bool>& used) {
  for (size_t i = 0; i < params_.size(); ++i) {
    const int param_idx = static_cast<int>(i);
    at::Tensor& grad = params_[i].mutable_grad();
    if (used[i]) {
      at::Tensor view = bucket_of(param_idx).view(slot_of(param_idx));
      if (old_grads_[i].defined()) view.add_(old_grads_[i]);
      grad = std::move(view);
    } else if (old_grads_[i].defined()) {
      grad = old_grads_[i];  // the bucket it may have been a view of is reused
    }
  }
}

void Reducer::forget_old_grads() {
  std::fill(old_grads_.begin(), old_grads_.end(), at::Tensor());
}

// The most gradients that a parameter has got in such a step: a step with fewer
// is reduced at its end, one with more in a second round. And how many from
// each microbatch, where that was the same at all times.
void Reducer::learn_counts() {
  if (!active_) return;
  const auto [found, is_new] = learned_.try_emplace(num_microbatches_);
  Learned& learned = found->second;
  const std::vector<int> counts = order_.counts();
  if (is_new) learned = {num_added_, counts};
  for (size_t i = 0; i < params_.size(); ++i) {
    learned.most[i] = std::max(learned.most[i], num_added_[i]);
    if (learned.per_microbatch[i] != counts[i]) learned.per_microbatch[i] = 0;
  }
}

}  // namespace smp::data_parallel
