#include "csrc/gradients/grad_targets.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace smp::gradients {

void GradTargets::begin_pass(bool is_first) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets_.size(); ++i) {
    const int param_idx = static_cast<int>(i);
    const at::Tensor& target = targets_[i];
    const at::Tensor grad = target.defined() ? target.grad() : at::Tensor();
    BucketReduction& bucket = buckets_.of(param_idx);
    if (!is_first && (!target.defined() ||
                      (grad.defined() && (used_[i] || old_[i].defined())))) {
      continue;  // earlier passes left it there
    }
    // The target is new, or the user set its `.grad` to None: begin from the
    // current `.grad`.
    used_[i] = false;
    bucket.drop_passes(buckets_.slot_of(param_idx));
    old_[i] = at::Tensor();
    if (!grad.defined()) continue;
    const at::Tensor& result = bucket.result();
    const bool is_ours = result.defined() && grad.is_alias_of(result);
    old_[i] = is_ours ? grad.detach().clone() : grad.detach();
  }
}

void GradTargets::publish_sums(std::vector<bool> used, bool goes_on) {
  used_ = std::move(used);
  publish(goes_on);
}

void GradTargets::publish_bucket(int bucket_idx,
                                 const std::vector<bool>& used) {
  const auto& slots = buckets_.plan().buckets[bucket_idx].slots;
  for (size_t i = 0; i < slots.size(); ++i) {
    used_[slots[i].record_idx] = used[i];
    publish_one(slots[i].record_idx, /*goes_on=*/false);
  }
}

void GradTargets::drop_bucket(int bucket_idx) {
  for (const BucketSlot& slot : buckets_.plan().buckets[bucket_idx].slots) {
    const at::Tensor& target = targets_[slot.record_idx];
    if (target.defined()) target.mutable_grad().reset();
    old_[slot.record_idx].reset();
  }
}

void GradTargets::publish(bool goes_on) {
  for (size_t i = 0; i < targets_.size(); ++i) {
    publish_one(static_cast<int>(i), goes_on);
  }
}

void GradTargets::publish_one(int param_idx, bool goes_on) {
  const at::Tensor& target = targets_[param_idx];
  if (!target.defined()) return;
  const at::Tensor& old = old_[param_idx];
  at::Tensor& grad = target.mutable_grad();
  if (used_[param_idx]) {
    at::Tensor view =
        buckets_.of(param_idx).gradient(buckets_.slot_of(param_idx), target);
    if (old.defined()) view = goes_on ? view.add(old) : view.add_(old);
    grad = std::move(view);
  } else if (old.defined()) {
    grad = old;  // the bucket it may have been a view of is reused
  }
}

void GradTargets::forget_old() {
  std::fill(old_.begin(), old_.end(), at::Tensor());
}

void GradTargets::restore() {
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (targets_[i].defined() && (used_[i] || old_[i].defined())) {
      targets_[i].mutable_grad() = old_[i];
    }
  }
}

}  // namespace smp::gradients
