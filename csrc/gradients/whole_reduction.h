#pragma once

#include <c10/core/TensorOptions.h>

#include "csrc/gradients/bucket_reduction.h"
#include "csrc/gradients/flat_bucket.h"
#include "csrc/gradients/flat_pool.h"

namespace smp::gradients {

/// A bucket that every rank keeps whole: gradients are summed in its own
/// memory, all-reduced there once per reduction, and `.grad` is a view of it.
/// The memory is its own, or lent by a pool from the first gradient to
/// `release`.
class WholeReduction final : public BucketReduction {
 public:
  /// @param plan  has one shard
  /// @param like  targets, by record index
  /// @param dp    may be null, like a group of one
  /// @param pool  lends the memory, and must outlive this object; null: the
  ///     bucket has memory of its own
  WholeReduction(const ShardedBucket& plan, const std::vector<at::Tensor>& like,
                 at::Device device, comm::CommunicatorPtr dp, FlatPool* pool);

  void release() override;
  void begin_round() override;
  bool has_memory() const override { return bucket_.is_attached(); }
  void add(int slot_idx, const at::Tensor& grad) override;
  void add_last(int slot_idx, const at::Tensor& grad,
                double pass_divisor) override;
  void launch(double pass_divisor) override;
  bool launch_hop(int) override { return false; }
  const comm::WorkPtr& work() const override { return work_; }
  const comm::Communicator& group() const override { return *dp_; }
  void settle() override { work_ = nullptr; }
  void keep_pass(double pass_divisor) override;
  void drop_passes(int slot_idx) override;
  void drop_passes() override { has_passes_ = false; }
  void add_late(int slot_idx, const at::Tensor& sum) override;
  void abandon() override;
  const at::Tensor& result() const override { return bucket_.flat(); }
  at::Tensor gradient(int slot_idx, const at::Tensor&) const override;

 private:
  void lease();
  void finish(double pass_divisor);

  FlatPool* const pool_;
  const at::TensorOptions options_;
  const int64_t flat_numel_;
  const comm::CommunicatorPtr dp_;
  const double divisor_;
  const std::vector<ShardHolding> slots_;
  FlatBucket bucket_;
  at::Tensor lent_;  // of the pool, while `bucket_` is attached
  comm::WorkPtr work_;
  bool has_passes_ = false;
  at::Tensor passes_;  // sum of earlier passes; allocated when first needed
};

}  // namespace smp::gradients
