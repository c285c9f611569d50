#include "csrc/gradients/late_gradients.h"

#include <ATen/ops/zeros.h>

#include "csrc/common/check.h"

namespace smp::gradients {

void LateGradients::reduce(const std::vector<bool>& late, double pass_divisor,
                           bool goes_further, Lock& lock) {
  for (int b = 0; b < buckets_.size(); ++b) {
    reduce_bucket(b, late, pass_divisor, goes_further, lock);
  }
}

void LateGradients::reduce_bucket(int bucket_idx, const std::vector<bool>& late,
                                  double pass_divisor, bool goes_further,
                                  Lock& lock) {
  const Bucket& plan = buckets_.plan().buckets[bucket_idx];
  std::vector<BucketSlot> slots;  // packed without gaps
  int64_t numel = 0;
  for (const BucketSlot& slot : plan.slots) {
    if (!late[slot.record_idx]) continue;
    slots.push_back({slot.record_idx, numel, slot.numel});
    numel += slot.numel;
  }
  if (slots.empty()) return;
  at::Tensor sum = at::zeros({numel}, at::TensorOptions()
                                          .dtype(plan.accumulation_dtype)
                                          .device(parameters_.device()));
  auto part = [&](const BucketSlot& slot) {
    return sum.narrow(0, slot.offset, slot.numel)
        .view(parameters_.params[slot.record_idx].sizes());
  };
  for (const BucketSlot& slot : slots) {
    const auto grads = grads_.find(slot.record_idx);
    if (grads == grads_.end()) continue;
    for (const at::Tensor& grad : grads->second) part(slot).add_(grad);
  }
  const double divisor = pass_divisor * plan.divisor;
  if (divisor != 1) sum.div_(divisor);
  sum_over(groups_.first(), sum, bucket_idx, lock);
  if (goes_further) {
    for (const comm::CommunicatorPtr& group : groups_.further()) {
      sum_over(*group, sum, bucket_idx, lock);
    }
  }
  for (const BucketSlot& slot : slots) {
    buckets_[bucket_idx].add_late(buckets_.slot_of(slot.record_idx),
                                  part(slot));
  }
}

void LateGradients::sum_over(comm::Communicator& group, const at::Tensor& sum,
                             int bucket_idx, Lock& lock) {
  const comm::WorkPtr work = group.all_reduce(sum, comm::ReduceOp::kSum);
  lock.unlock();
  comm::follow(
      *work, groups_.wait_options(), group,
      detail::concat("reduction of late gradients of bucket ", bucket_idx));
  lock.lock();
}

}  // namespace smp::gradients
