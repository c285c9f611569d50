#include "csrc/gradients/whole_reduction.h"

#include <ATen/ops/empty_like.h>

#include <utility>

#include "csrc/memory/host_pages.h"

namespace smp::gradients {

WholeReduction::WholeReduction(const ShardedBucket& plan,
                               const std::vector<at::Tensor>& like,
                               at::Device device, comm::CommunicatorPtr dp,
                               FlatPool* pool)
    : pool_(pool),
      options_(
          at::TensorOptions().dtype(plan.accumulation_dtype).device(device)),
      flat_numel_(plan.flat_numel()),
      dp_(std::move(dp)),
      divisor_(plan.divisor),
      slots_(plan.holdings.front()),
      bucket_(plan, like) {
  if (pool_) {
    pool_->expect(flat_numel_, plan.accumulation_dtype);
  } else {
    bucket_.attach(memory::zeros_in_pages(flat_numel_, options_));
  }
}

void WholeReduction::lease() {
  if (bucket_.is_attached()) return;
  lent_ = pool_->take(flat_numel_, options_);
  bucket_.attach(lent_.narrow(0, 0, flat_numel_));
}

// Gives lent memory back. In memory of its own the next sum takes the place.
void WholeReduction::release() {
  if (!pool_ || !bucket_.is_attached()) return;
  bucket_.detach();
  pool_->give_back(std::exchange(lent_, {}));
}

void WholeReduction::begin_round() { bucket_.reset(); }

void WholeReduction::add(int slot_idx, const at::Tensor& grad) {
  lease();
  bucket_.add(slot_idx, grad);
}

// Adds the last gradient. With passes the division has to wait for their sum.
void WholeReduction::add_last(int slot_idx, const at::Tensor& grad,
                              double pass_divisor) {
  lease();
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
  lease();  // other ranks may have gradients
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
  has_passes_ = false;
  if (std::exchange(work_, nullptr) == nullptr) return release();
  if (!pool_) return;
  bucket_.detach();
  lent_.reset();  // stays with the operation in flight, and is not used again
}

at::Tensor WholeReduction::gradient(int slot_idx, const at::Tensor&) const {
  return bucket_.view(slot_idx);
}

}  // namespace smp::gradients
