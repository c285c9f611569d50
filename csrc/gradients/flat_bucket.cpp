#include "csrc/gradients/flat_bucket.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::gradients {

namespace {

std::vector<Segment> gaps_between(std::vector<Segment> segments,
                                  int64_t flat_numel) {
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) {
    return a.flat_offset < b.flat_offset;
  });
  segments.push_back({-1, flat_numel, 0, 0});
  std::vector<Segment> gaps;
  int64_t end = 0;
  for (const Segment& segment : segments) {
    if (segment.flat_offset > end) {
      gaps.push_back({-1, end, 0, segment.flat_offset - end});
    }
    end = segment.flat_offset + segment.numel;
  }
  return gaps;
}

at::Tensor part_of(const at::Tensor& flat, const Segment& segment) {
  return flat.narrow(0, segment.flat_offset, segment.numel);
}

void add_to(at::Tensor view, const at::Tensor& part, bool is_first,
            double divisor) {
  if (is_first && divisor != 1 && part.scalar_type() == view.scalar_type()) {
    at::div_out(view, part, at::native::wrapped_scalar_tensor(divisor));
    return;
  }
  is_first ? view.copy_(part) : view.add_(part);
  if (divisor != 1) view.div_(divisor);
}

}  // namespace

FlatBucket::FlatBucket(const ShardedBucket& plan,
                       const std::vector<at::Tensor>& like)
    : gaps_(gaps_between(plan.segments, plan.flat_numel())) {
  for (const ShardHolding& slot : plan.holdings.front()) {
    Slot& made = slots_.emplace_back();
    made.like = like[slot.record_idx].detach();
    for (const Segment& segment : plan.segments) {
      if (segment.record_idx == slot.record_idx) {
        made.segments.push_back(segment);
      }
    }
  }
}

void FlatBucket::attach(at::Tensor flat) {
  const at::NoGradGuard no_grad;
  flat_ = std::move(flat);
  for (const Segment& gap : gaps_) part_of(flat_, gap).zero_();
}

at::Tensor FlatBucket::detach() { return std::exchange(flat_, {}); }

at::Tensor FlatBucket::view(int slot_idx) const {
  const Slot& slot = slots_[slot_idx];
  const at::Tensor& like = slot.like;
  if (slot.segments.empty()) return flat_.narrow(0, 0, 0).view(like.sizes());
  SMP_ASSERT(slot.segments.size() == 1, "a gradient in ", slot.segments.size(),
             " segments has no view");
  const Segment& segment = slot.segments.front();
  if (like.is_non_overlapping_and_dense()) {
    return flat_.as_strided(like.sizes(), like.strides(), segment.flat_offset);
  }
  return part_of(flat_, segment).view(like.sizes());
}

void FlatBucket::add(int slot_idx, const at::Tensor& grad, double divisor) {
  Slot& slot = slots_[slot_idx];
  SMP_ASSERT(slot.state != SlotState::kDivided, "slot ", slot_idx,
             " got a gradient after its last one");
  const bool is_first = slot.state == SlotState::kEmpty;
  slot.state = divisor == 1 ? SlotState::kSum : SlotState::kDivided;
  if (slot.segments.size() <= 1) {
    add_to(view(slot_idx), grad, is_first, divisor);
    return;
  }
  const at::Tensor elements = grad.reshape({-1});
  for (const Segment& segment : slot.segments) {
    add_to(part_of(flat_, segment),
           elements.narrow(0, segment.begin, segment.numel), is_first, divisor);
  }
}

void FlatBucket::reset() {
  for (Slot& slot : slots_) slot.state = SlotState::kEmpty;
}

void FlatBucket::finish(double divisor) {
  const bool is_plain = std::none_of(
      slots_.begin(), slots_.end(),
      [](const Slot& slot) { return slot.state == SlotState::kDivided; });
  for (const Slot& slot : slots_) {
    for (const Segment& segment : slot.segments) {
      if (slot.state == SlotState::kEmpty) {
        part_of(flat_, segment).zero_();
      } else if (slot.state == SlotState::kSum && !is_plain) {
        part_of(flat_, segment).div_(divisor);
      }
    }
  }
  if (is_plain && divisor != 1) flat_.div_(divisor);
}

}  // namespace smp::gradients
