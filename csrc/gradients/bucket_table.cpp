#include "csrc/gradients/bucket_table.h"

#include "csrc/common/check.h"
#include "csrc/gradients/whole_reduction.h"

namespace smp::gradients {
namespace {

void check_sharding(const ReducedParameters& parameters,
                    const ReductionGroups& groups, const Sharding& sharding,
                    const std::vector<ShardedBucket>& plan) {
  const auto& [params, targets, records] = parameters;
  int size = sharding.shard->size();
  for (const auto& group : sharding.further) size *= group->size();
  SMP_CHECK_VALUE(groups.has_peers() && sharding.shard->size() > 1 &&
                      size == groups.all()->size(),
                  "the groups of shards have ", size, " ranks together, the ",
                  "group over which gradients are reduced has ",
                  groups.has_peers() ? groups.all()->size() : 1);
  for (const ShardedBucket& bucket : plan) {
    for (const ShardHolding& held :
         bucket.holdings[sharding.shard->group_rank()]) {
      const ParameterRecord& record = records[held.record_idx];
      const at::Tensor& target = targets[held.record_idx];
      const at::Tensor& param = params[held.record_idx];
      // A freed parameter shows one element in all places.
      SMP_CHECK_VALUE(
          param.is_contiguous() || !param.is_non_overlapping_and_dense(),
          "parameter ", record.name,
          " is not contiguous and cannot be sharded");
      SMP_CHECK_VALUE(!target.defined() || target.numel() == held.numel ||
                          target.numel() == held.room,
                      "the target of parameter ", record.name, " has ",
                      target.numel(), " elements, this rank holds ", held.numel,
                      " of ", record.describe());
    }
  }
}

}  // namespace

BucketTable::BucketTable(const ReducedParameters& parameters,
                         const ReductionGroups& groups,
                         const ReducerOptions& options)
    : plan_(plan_buckets(parameters.records, options.bucket_cap_bytes)) {
  const bool is_sharded = options.is_sharded();
  const int num_shards = is_sharded ? options.sharding->shard->size() : 1;
  const auto layout =
      is_sharded ? options.sharding->layout : ShardLayout::kEqualCut;
  const auto plan = plan_shards(parameters.records, options.bucket_cap_bytes,
                                num_shards, layout);
  if (is_sharded) check_sharding(parameters, groups, *options.sharding, plan);
  std::vector<at::Tensor> like = parameters.params;
  if (!is_sharded) {
    for (size_t i = 0; i < like.size(); ++i) {
      if (parameters.targets[i].defined()) like[i] = parameters.targets[i];
    }
  }
  for (const ShardedBucket& bucket : plan) {
    if (is_sharded) {
      buckets_.push_back(std::make_unique<ShardReduction>(
          bucket, like, parameters.device(), *options.sharding, pool_));
    } else {
      buckets_.push_back(std::make_unique<WholeReduction>(
          bucket, like, parameters.device(), groups.all(),
          options.applies() ? &pool_ : nullptr));
    }
  }
}

std::vector<int> BucketTable::bucket_idxs() const {
  std::vector<int> idxs;
  for (const SlotPlace& place : plan_.places) idxs.push_back(place.bucket_idx);
  return idxs;
}

}  // namespace smp::gradients
