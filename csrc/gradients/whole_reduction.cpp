#include "csrc/gradients/whole_reduction.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace smp::gradients {

WholeReduction::WholeReduction(const ShardedBucket& plan,
                               const std::vector<at::Tensor>& like,
                               at::Device device, comm::CommunicatorPtr dp)
    : dp_(std::move(dp)),
      divisor_(plan.divisor),
      slots_(plan.holdings.front()),
      bucket_(plan, like) {
  bucket_.attach(at::zeros(
      {plan.flat_numel()},
      at::TensorOptions().dtype(plan.accumulation_dtype).device(device)));
}

void WholeReduction::begin_round() { bucket_.reset(); }

void WholeReduction::add(int slot_idx, const at::Tensor& grad) {
  bucket_.add(slot_idx, grad);
}

// Adds the last gradient. With passes the division has to wait for their sum.
void WholeReduction::add_last(int slot_idx, const at::Tensor& grad,
                              double pass_divisor) {
  bucket_.add(slot_idx, grad, has_passes_ ? 1 : pass_divisor * divisor_);
}

// Divides once where there are no passes, as one process would do it.
void WholeReduction::finish(double pass_divisor) {
  if (!has_passes_) {
    bucket_.finish(pass_divisor * divisor_);
    return;
  }
  bucket_.finish(pass_divisor);
  bucket_.flat().add_(passes_);
  if (divisor_ != 1) bucket_.flat().div_(divisor_);
}

void WholeReduction::launch(double pass_divisor) {
  finish(pass_divisor);
  if (dp_ && dp_->size() > 1) {
    work_ = dp_->all_reduce(bucket_.flat(), comm::ReduceOp::kSum);
  }
}

// Keeps the sum of a pass. The views then hold the sum of all passes so far.
void WholeReduction::keep_pass(double pass_divisor) {
  bucket_.finish(pass_divisor);
  const at::Tensor& flat = bucket_.flat();
  if (has_passes_) flat.add_(passes_);
  if (!passes_.defined()) passes_ = at::empty_like(flat);
  passes_.copy_(flat);
  has_passes_ = true;
}

void WholeReduction::drop_passes(int slot_idx) {
  if (!has_passes_) return;
  const ShardHolding& slot = slots_[slot_idx];
  passes_.narrow(0, slot.offset, slot.numel).zero_();
}

void WholeReduction::add_late(int slot_idx, const at::Tensor& sum) {
  bucket_.view(slot_idx).add_(sum);
}

void WholeReduction::abandon() {
  work_ = nullptr;
  has_passes_ = false;
}

at::Tensor WholeReduction::gradient(int slot_idx, const at::Tensor&) const {
  return bucket_.view(slot_idx);
}

}  // namespace smp::gradients
