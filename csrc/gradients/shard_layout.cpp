#include "csrc/gradients/shard_layout.h"

#include <algorithm>

#include "csrc/common/check.h"

namespace smp::gradients {

namespace {

int64_t ceil_div(int64_t numerator, int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

void add_segment(ShardedBucket& bucket, Segment segment) {
  if (segment.numel > 0) bucket.segments.push_back(segment);
}

// Cuts the flat tensor of the slots into equal parts.
void cut_equally(const Bucket& plan, int64_t alignment, ShardedBucket& bucket) {
  bucket.shard_numel =
      round_up(ceil_div(plan.numel, bucket.num_shards), alignment);
  for (const BucketSlot& slot : plan.slots) {
    add_segment(bucket, {slot.record_idx, slot.offset, 0, slot.numel});
    for (int shard = 0; shard < bucket.num_shards; ++shard) {
      const int64_t shard_begin = shard * bucket.shard_numel;
      auto inside = [&](int64_t flat_offset) {
        return std::clamp(flat_offset, shard_begin,
                          shard_begin + bucket.shard_numel);
      };
      const int64_t begin = inside(slot.offset);
      const int64_t numel = inside(slot.offset + slot.numel) - begin;
      bucket.holdings[shard].push_back({slot.record_idx,
                                        numel == 0 ? 0 : begin - slot.offset,
                                        numel, begin - shard_begin, numel});
    }
  }
}

// Cuts each parameter into equal parts, one in each shard.
void cut_each(const Bucket& plan, int64_t alignment, ShardedBucket& bucket) {
  int64_t numel = 0;
  for (const BucketSlot& slot : plan.slots) {
    numel += ceil_div(slot.numel, bucket.num_shards);
  }
  bucket.shard_numel = round_up(numel, alignment);
  int64_t offset = 0;  // in a shard
  for (const BucketSlot& slot : plan.slots) {
    const int64_t room = ceil_div(slot.numel, bucket.num_shards);
    for (int shard = 0; shard < bucket.num_shards; ++shard) {
      const int64_t begin = std::min(shard * room, slot.numel);
      const int64_t held = std::min(room, slot.numel - begin);
      bucket.holdings[shard].push_back(
          {slot.record_idx, begin, held, offset, room});
      add_segment(bucket, {slot.record_idx, shard * bucket.shard_numel + offset,
                           begin, held});
    }
    offset += room;
  }
}

}  // namespace

std::vector<ShardedBucket> plan_shards(
    const std::vector<ParameterRecord>& records, int64_t cap_bytes,
    int num_shards, ShardLayout layout) {
  SMP_CHECK_VALUE(num_shards >= 1, "a bucket is divided into at least one ",
                  "shard, got ", num_shards);
  std::vector<ShardedBucket> buckets;
  for (const Bucket& plan : plan_buckets(records, cap_bytes).buckets) {
    ShardedBucket& bucket = buckets.emplace_back();
    bucket.dtype = plan.dtype;
    bucket.accumulation_dtype = plan.accumulation_dtype;
    bucket.group = plan.group;
    bucket.divisor = plan.divisor;
    bucket.num_shards = num_shards;
    bucket.holdings.resize(num_shards);
    const int64_t alignment = slot_alignment(plan.dtype);
    if (layout == ShardLayout::kEqualCut) {
      cut_equally(plan, alignment, bucket);
    } else {
      cut_each(plan, alignment, bucket);
    }
    // Some transports do not support tensors without elements.
    bucket.shard_numel = std::max(bucket.shard_numel, alignment);
  }
  return buckets;
}

}  // namespace smp::gradients
