#pragma once

#include <c10/core/TensorOptions.h>

#include <memory>

#include "csrc/gradients/bucket_reduction.h"
#include "csrc/gradients/flat_bucket.h"
#include "csrc/gradients/flat_pool.h"

namespace smp::gradients {

/// The settings of a reduction in which each rank keeps a shard of the
/// gradients.
struct Sharding {
  ShardLayout layout = ShardLayout::kEqualCut;
  /// Ranks that together hold one copy of the state; at least two.
  comm::CommunicatorPtr shard;
  /// Groups over which the shard is summed afterwards, in this order: ranks
  /// that hold equal parts, and the tp group where all its ranks hold the
  /// parameters. None of them is null.
  std::vector<comm::CommunicatorPtr> further;
  /// True: reduce over `shard` after every microbatch; ranks then have equal
  /// numbers of microbatches. False: reduce once per step.
  bool every_microbatch = false;
};

/// A bucket of which this rank keeps a shard. Gradients are summed in memory
/// that the bucket has from the first gradient to the reduce-scatter; further
/// rounds are added on the shard. At the boundary the shard is summed over the
/// further groups.
/// Source: two hops as in MiCS (arXiv:2205.00119).
class ShardReduction final : public BucketReduction {
 public:
  /// @param plan  has `sharding.shard->size()` shards
  /// @param like  parameters, by record index; contiguous
  /// @param pool  must outlive this object
  ShardReduction(const ShardedBucket& plan, const std::vector<at::Tensor>& like,
                 at::Device device, const Sharding& sharding, FlatPool& pool);

  void release() override;
  void begin_round() override;
  bool has_memory() const override { return bucket_.is_attached(); }
  void add(int slot_idx, const at::Tensor& grad) override;
  void add_last(int slot_idx, const at::Tensor& grad,
                double pass_divisor) override;
  void launch(double pass_divisor) override;
  bool launch_hop(int hop_idx) override;
  const comm::WorkPtr& work() const override { return work_; }
  const comm::Communicator& group() const override { return *group_; }
  void settle() override;
  void keep_pass(double) override {}  // the sum is on the shard
  void drop_passes(int slot_idx) override;
  void drop_passes() override { has_sum_ = false; }
  void add_late(int slot_idx, const at::Tensor& sum) override;
  void abandon() override;
  const at::Tensor& result() const override { return shard_; }
  at::Tensor gradient(int slot_idx, const at::Tensor& target) const override;

 private:
  at::Tensor take(int64_t numel);
  void lease();
  at::Tensor held(int slot_idx) const;

  const Sharding& sharding_;
  FlatPool& pool_;
  const double divisor_;
  const int64_t flat_numel_;
  const int64_t shard_numel_;
  const at::TensorOptions options_;
  const std::vector<ShardHolding> slots_;  // holdings of this rank
  FlatBucket bucket_;
  at::Tensor shard_;        // sum of the rounds since the last boundary; no
                            // memory before the first of them
  bool has_sum_ = false;    // else its content means nothing
  at::Tensor flat_memory_;  // of the pool, while `bucket_` is attached
  at::Tensor incoming_;     // the shard of a further round, in flight
  comm::WorkPtr work_;
  const comm::Communicator* group_;  // of `work_`
};

}  // namespace smp::gradients
