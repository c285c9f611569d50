#include "csrc/gradients/shard_reduction.h"

#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/host_pages.h"

namespace smp::gradients {

ShardReduction::ShardReduction(const ShardedBucket& plan,
                               const std::vector<at::Tensor>& like,
                               at::Device device, const Sharding& sharding,
                               FlatPool& pool)
    : sharding_(sharding),
      pool_(pool),
      divisor_(plan.divisor),
      flat_numel_(plan.flat_numel()),
      shard_numel_(plan.shard_numel),
      options_(
          at::TensorOptions().dtype(plan.accumulation_dtype).device(device)),
      slots_(plan.holdings.at(sharding.shard->group_rank())),
      bucket_(plan, like),
      group_(sharding.shard.get()) {
  pool_.expect(flat_numel_, plan.accumulation_dtype);
}

at::Tensor ShardReduction::take(int64_t numel) {
  return pool_.take(numel, options_);
}

// Drops a shard without a sum. Its memory is free now if the user has set
// `.grad` to None meanwhile.
void ShardReduction::release() {
  if (!has_sum_) shard_.reset();
}

void ShardReduction::lease() {
  if (bucket_.is_attached()) return;
  flat_memory_ = take(flat_numel_);
  bucket_.attach(flat_memory_.narrow(0, 0, flat_numel_));
}

void ShardReduction::begin_round() { bucket_.reset(); }

void ShardReduction::add(int slot_idx, const at::Tensor& grad) {
  lease();
  bucket_.add(slot_idx, grad);
}

void ShardReduction::add_last(int slot_idx, const at::Tensor& grad,
                              double pass_divisor) {
  lease();
  bucket_.add(slot_idx, grad, pass_divisor * divisor_);
}

void ShardReduction::launch(double pass_divisor) {
  lease();  // other ranks may have gradients
  bucket_.finish(pass_divisor * divisor_);
  if (!shard_.defined()) {
    shard_ = memory::empty_in_pages(shard_numel_, options_);
  }
  at::Tensor sum = shard_;
  if (has_sum_) {
    incoming_ = take(shard_numel_);
    sum = incoming_.narrow(0, 0, shard_numel_);
  }
  group_ = sharding_.shard.get();
  work_ = sharding_.shard->reduce_scatter(sum, bucket_.flat(),
                                          comm::ReduceOp::kSum);
}

bool ShardReduction::launch_hop(int hop_idx) {
  if (hop_idx >= static_cast<int>(sharding_.further.size())) return false;
  const comm::CommunicatorPtr& group = sharding_.further[hop_idx];
  group_ = group.get();
  work_ = group->all_reduce(shard_, comm::ReduceOp::kSum);
  return true;
}

void ShardReduction::settle() {
  work_ = nullptr;
  if (!bucket_.is_attached()) return;  // a further hop
  bucket_.detach();
  pool_.give_back(std::exchange(flat_memory_, {}));
  if (incoming_.defined()) {
    shard_.add_(incoming_.narrow(0, 0, shard_numel_));
    pool_.give_back(std::exchange(incoming_, {}));
  }
  has_sum_ = true;
}

at::Tensor ShardReduction::held(int slot_idx) const {
  const ShardHolding& slot = slots_[slot_idx];
  return shard_.narrow(0, slot.offset, slot.numel);
}

void ShardReduction::drop_passes(int slot_idx) {
  if (has_sum_) held(slot_idx).zero_();
}

void ShardReduction::add_late(int slot_idx, const at::Tensor& sum) {
  const ShardHolding& slot = slots_[slot_idx];
  held(slot_idx).add_(sum.reshape({-1}).narrow(0, slot.begin, slot.numel));
}

void ShardReduction::abandon() {
  has_sum_ = false;
  const bool is_in_flight = std::exchange(work_, nullptr) != nullptr;
  if (!bucket_.is_attached()) return;
  bucket_.detach();
  at::Tensor flat = std::exchange(flat_memory_, {});
  incoming_.reset();
  // Memory in flight stays with its operation and is not used again.
  if (!is_in_flight) pool_.give_back(std::move(flat));
}

at::Tensor ShardReduction::gradient(int slot_idx,
                                    const at::Tensor& target) const {
  const ShardHolding& slot = slots_[slot_idx];
  return shard_.narrow(0, slot.offset, target.numel()).view(target.sizes());
}

}  // namespace smp::gradients
