#pragma once

#include <cstdint>
#include <vector>

#include "csrc/gradients/bucket_plan.h"

namespace smp::gradients {

/// The division of a bucket over the ranks that hold one copy of the state.
enum class ShardLayout {
  kEqualCut,      ///< the flat bucket in equal parts, wherever that cuts
  kPerParameter,  ///< each parameter in equal parts
};

/// Elements `[begin, begin + numel)` of a flattened parameter lie at
/// `flat_offset` of the flat bucket.
struct Segment {
  int record_idx = -1;
  int64_t flat_offset = 0;
  int64_t begin = 0;
  int64_t numel = 0;

  bool operator==(const Segment&) const = default;
};

/// The part of a parameter that one rank of the shard group holds: elements
/// `[begin, begin + numel)`, at `offset` of the rank's shard.
struct ShardHolding {
  int record_idx = -1;
  int64_t begin = 0;
  int64_t numel = 0;   ///< 0: nothing
  int64_t offset = 0;  ///< in elements; also where numel is 0
  int64_t room = 0;    ///< elements from `offset` on reserved for it

  bool operator==(const ShardHolding&) const = default;
};

/// A bucket whose flat tensor is `[num_shards * shard_numel]`; part r belongs
/// to rank r of the shard group. Elements outside of segments are padding.
struct ShardedBucket {
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< of the parameters
  c10::ScalarType accumulation_dtype = c10::ScalarType::Float;
  ReductionGroup group = ReductionGroup::kDp;
  double divisor = 1;
  int num_shards = 1;
  int64_t shard_numel = 0;
  std::vector<Segment> segments;  ///< by slot, then by `begin`; none is empty
  /// `[shard][slot]`: all parameters of the bucket, last parameter first.
  std::vector<std::vector<ShardHolding>> holdings;

  int64_t flat_numel() const { return num_shards * shard_numel; }
};

/// Divides the buckets of `plan_buckets` over `num_shards` ranks. Shards are
/// multiples of kSlotAlignmentBytes in the dtype of the parameters, and of one
/// size on all ranks. With `kEqualCut` a parameter is one segment, at the
/// offset of its slot; with `kPerParameter` rank r holds elements
/// `[r * c, (r + 1) * c)` of it, `c = ceil(numel / num_shards)`, and has room
/// for c, behind each other without gaps. Pure.
/// @throws ValueError as plan_buckets, and when there are no shards
/// Source: "equal cut" as in ZeRO (arXiv:1910.02054), stages 1 and 2; "per
/// parameter" as in its stage 3.
std::vector<ShardedBucket> plan_shards(
    const std::vector<ParameterRecord>& records, int64_t cap_bytes,
    int num_shards, ShardLayout layout);

}  // namespace smp::gradients
