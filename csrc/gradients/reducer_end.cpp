// The end of a step: agreement, last sums, and what becomes `.grad`.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/gradients/reducer.h"

namespace smp::gradients {

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
  late_.clear();
  phase_ = Phase::kIdle;
  order_.begin(0, {});
  if (!active_ && !any_active_) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (targets_[i].defined() && (used_[i] || old_grads_[i].defined())) {
      targets_[i].mutable_grad() = old_grads_[i];
    }
  }
  for (const auto& bucket : buckets_) bucket->abandon();
  pool_.trim();
  pass_idx_ = 0;
}

void Reducer::close(Lock& lock) {
  expect_as_first();
  order_.finish_all();
  launch_round(lock);
  if (any_active_) {
    finish_pass(lock);
    learn_counts();
  } else if (pass_idx_ == 0) {
    forget_old_grads();
  }
  header_work_ = nullptr;
  pool_.trim();
  phase_ = Phase::kIdle;
  order_.begin(0, {});
}

void Reducer::finish_pass(Lock& lock) {
  if (reduces()) {
    const std::vector<bool> used = finish_sums(lock);
    publish(used);
    used_ = used;
  } else {
    for (const auto& bucket : buckets_) bucket->keep_pass(pass_divisor());
    publish(used_);
  }
  if (!is_last_pass()) {
    ++pass_idx_;
    return;
  }
  ++stats_.num_reductions;
  pass_idx_ = 0;
  for (const auto& bucket : buckets_) bucket->drop_passes();
  forget_old_grads();
}

// Returns which parameters some rank has used.
std::vector<bool> Reducer::finish_sums(Lock& lock) {
  if (!has_peers()) {
    settle_all(lock);
    return used_;
  }
  const size_t num_params = params_.size();
  std::vector<int64_t> flags(used_.begin(), used_.end());
  flags.resize(2 * num_params, 0);
  for (const auto& [param_idx, grads] : late_) {
    flags[num_params + param_idx] = 1;
  }
  lock.unlock();
  flags = comm::agree_on_maxima(control(), flags, options_.patience,
                                "exchange of used parameters");
  lock.lock();
  settle_all(lock);
  const std::vector<bool> late(flags.begin() + num_params, flags.end());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    reduce_late(static_cast<int>(b), late, lock);
  }
  if (is_last_pass()) reduce_further(lock);
  stats_.num_late_parameters += static_cast<int64_t>(late_.size());
  late_.clear();
  return {flags.begin(), flags.begin() + num_params};
}

// The second round of one bucket: what came after it had been launched, here or
// on another rank.
void Reducer::reduce_late(int bucket_idx, const std::vector<bool>& late,
                          Lock& lock) {
  const Bucket& plan = plan_.buckets[bucket_idx];
  std::vector<BucketSlot> slots;  // packed without gaps
  int64_t numel = 0;
  for (const BucketSlot& slot : plan.slots) {
    if (!late[slot.record_idx]) continue;
    slots.push_back({slot.record_idx, numel, slot.numel});
    numel += slot.numel;
  }
  if (slots.empty()) return;
  at::Tensor sum = at::zeros(
      {numel},
      at::TensorOptions().dtype(plan.accumulation_dtype).device(device_));
  auto part = [&](const BucketSlot& slot) {
    return sum.narrow(0, slot.offset, slot.numel)
        .view(params_[slot.record_idx].sizes());
  };
  for (const BucketSlot& slot : slots) {
    const auto grads = late_.find(slot.record_idx);
    if (grads == late_.end()) continue;
    for (const at::Tensor& grad : grads->second) part(slot).add_(grad);
  }
  const double divisor = pass_divisor() * plan.divisor;
  if (divisor != 1) sum.div_(divisor);
  const comm::WorkPtr work =
      first_group().all_reduce(sum, comm::ReduceOp::kSum);
  lock.unlock();
  comm::follow(
      *work, options_.patience, first_group(),
      detail::concat("reduction of late gradients of bucket ", bucket_idx));
  lock.lock();
  for (const BucketSlot& slot : slots) {
    buckets_[bucket_idx]->add_late(slot_of(slot.record_idx), part(slot));
  }
}

// What follows the first sum where shards are kept.
void Reducer::reduce_further(Lock& lock) {
  for (int hop_idx = 0;; ++hop_idx) {
    bool has_hop = false;
    for (const auto& bucket : buckets_) {
      has_hop = bucket->launch_hop(hop_idx) || has_hop;
    }
    if (!has_hop) return;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      await(static_cast<int>(b), lock);
      buckets_[b]->settle();
    }
  }
}

void Reducer::publish(const std::vector<bool>& used) {
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& target = targets_[i];
    if (!target.defined()) continue;
    const int param_idx = static_cast<int>(i);
    at::Tensor& grad = target.mutable_grad();
    if (used[i]) {
      at::Tensor view =
          bucket_of(param_idx).gradient(slot_of(param_idx), target);
      if (old_grads_[i].defined()) {
        // A shard goes on with the next pass, and must not have them twice.
        const bool goes_on = is_sharded() && !is_last_pass();
        view = goes_on ? view.add(old_grads_[i]) : view.add_(old_grads_[i]);
      }
      grad = std::move(view);
    } else if (old_grads_[i].defined()) {
      grad = old_grads_[i];  // the bucket it may have been a view of is reused
    }
  }
}

void Reducer::forget_old_grads() {
  std::fill(old_grads_.begin(), old_grads_.end(), at::Tensor());
}

// The most gradients that a parameter has got in such a round: one with fewer
// is reduced at its end, one with more in a second round. And how many from
// each microbatch, where that was the same at all times.
void Reducer::learn_counts() {
  if (!active_) return;
  const auto [found, is_new] = learned_.try_emplace(num_microbatches_);
  Learned& learned = found->second;
  const std::vector<int> counts = order_.counts();
  if (is_new) learned = {most_added_, counts};
  for (size_t i = 0; i < params_.size(); ++i) {
    learned.most[i] = std::max(learned.most[i], most_added_[i]);
    if (learned.per_microbatch[i] != counts[i]) learned.per_microbatch[i] = 0;
  }
}

}  // namespace smp::gradients
