#include "csrc/data_parallel/flat_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace smp::data_parallel {

namespace {

at::Tensor slot_view(const at::Tensor& flat, const BucketSlot& slot,
                     const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    return flat.as_strided(param.sizes(), param.strides(), slot.offset);
  }
  return flat.narrow(0, slot.offset, slot.numel).view(param.sizes());
}

}  // namespace

FlatBucket::FlatBucket(const Bucket& plan,
                       const std::vector<at::Tensor>& params)
    : divisor_(plan.divisor),
      slots_(plan.slots),
      touched_(plan.slots.size(), false) {
  const at::NoGradGuard no_grad;
  const at::Tensor& first = params[slots_.front().record_idx];
  flat_ = at::zeros({plan.numel}, first.options().requires_grad(false));
  views_.reserve(slots_.size());
  for (const BucketSlot& slot : slots_) {
    views_.push_back(slot_view(flat_, slot, params[slot.record_idx]));
  }
}

void FlatBucket::add(int slot_idx, const at::Tensor& grad) {
  if (touched_[slot_idx]) {
    views_[slot_idx].add_(grad);
  } else {
    views_[slot_idx].copy_(grad);
    touched_[slot_idx] = true;
  }
}

void FlatBucket::reset() { std::fill(touched_.begin(), touched_.end(), false); }

void FlatBucket::fill_untouched() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!touched_[i]) views_[i].zero_();
  }
}

void FlatBucket::keep_pass(double divisor) {
  fill_untouched();
  if (divisor != 1) flat_.div_(divisor);
  if (has_passes_) flat_.add_(passes_);
  if (!passes_.defined()) passes_ = at::empty_like(flat_);
  passes_.copy_(flat_);
  has_passes_ = true;
}

void FlatBucket::finish(double pass_divisor) {
  fill_untouched();
  if (has_passes_) {
    if (pass_divisor != 1) flat_.div_(pass_divisor);
    flat_.add_(passes_);
    if (divisor_ != 1) flat_.div_(divisor_);
    return;
  }
  // One division, as one process would do it.
  const double total = pass_divisor * divisor_;
  if (total != 1) flat_.div_(total);
}

void FlatBucket::scale_late(at::Tensor& grad, double pass_divisor) const {
  const double total = pass_divisor * divisor_;
  if (total != 1) grad.div_(total);
}

void FlatBucket::drop_passes(int slot_idx) {
  if (!has_passes_) return;
  const BucketSlot& slot = slots_[slot_idx];
  passes_.narrow(0, slot.offset, slot.numel).zero_();
}

}  // namespace smp::data_parallel
