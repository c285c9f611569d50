#include "csrc/gradients/shard_layout.h"

#include <gtest/gtest.h>

#include <random>

#include "csrc/common/check.h"

namespace smp::gradients {
namespace {

using Dtype = c10::ScalarType;

constexpr ShardLayout kLayouts[] = {ShardLayout::kEqualCut,
                                    ShardLayout::kPerParameter};
constexpr int64_t kCapBytes = 4096;

std::vector<ParameterRecord> random_sharded_records(unsigned seed) {
  std::mt19937 random(seed);
  auto below = [&](int n) { return static_cast<int>(random() % n); };
  const Dtype dtypes[] = {Dtype::Float, Dtype::Double, Dtype::BFloat16};
  std::vector<ParameterRecord> records(below(30));
  for (size_t i = 0; i < records.size(); ++i) {
    std::vector<int64_t> shape(below(3));
    for (int64_t& size : shape) size = below(50);
    records[i] = whole_record(static_cast<int>(i), "p" + std::to_string(i),
                              shape, dtypes[below(3)], 1 + below(2));
    if (records[i].dtype == Dtype::BFloat16 && below(2) == 0) {
      records[i].accumulation_dtype = Dtype::Float;
    }
  }
  return records;
}

// Calls `check(records, num_shards, layout, buckets)` for many plans.
template <typename Check>
void for_each_plan(Check&& check) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const auto records = random_sharded_records(seed);
    for (const int num_shards : {1, 2, 3, 4, 8}) {
      for (const ShardLayout layout : kLayouts) {
        check(records, num_shards, layout,
              plan_shards(records, kCapBytes, num_shards, layout));
      }
    }
  }
}

TEST(ShardLayout, every_element_lies_at_one_place) {
  for_each_plan([](const auto& records, int num_shards, ShardLayout,
                   const auto& buckets) {
    std::vector<int64_t> num_placed(records.size(), 0);
    for (const ShardedBucket& bucket : buckets) {
      ASSERT_EQ(bucket.num_shards, num_shards);
      std::vector<bool> taken(bucket.flat_numel(), false);
      for (const Segment& segment : bucket.segments) {
        EXPECT_EQ(records[segment.record_idx].dtype, bucket.dtype);
        EXPECT_EQ(records[segment.record_idx].accumulation_dtype,
                  bucket.accumulation_dtype);
        EXPECT_GT(segment.numel, 0);
        ASSERT_LE(segment.flat_offset + segment.numel, bucket.flat_numel());
        for (int64_t i = 0; i < segment.numel; ++i) {
          EXPECT_FALSE(taken[segment.flat_offset + i]);
          taken[segment.flat_offset + i] = true;
        }
        // In the order of the elements: together one interval from 0.
        EXPECT_EQ(segment.begin, num_placed[segment.record_idx]);
        num_placed[segment.record_idx] += segment.numel;
      }
    }
    for (size_t i = 0; i < records.size(); ++i) {
      EXPECT_EQ(num_placed[i], records[i].local_numel());
    }
  });
}

// Returns where the segments place element `element` of a parameter.
int64_t flat_offset_of(const ShardedBucket& bucket, int record_idx,
                       int64_t element) {
  for (const Segment& segment : bucket.segments) {
    const int64_t inside = element - segment.begin;
    if (segment.record_idx == record_idx && inside >= 0 &&
        inside < segment.numel) {
      return segment.flat_offset + inside;
    }
  }
  return -1;
}

TEST(ShardLayout, holdings_are_the_parts_of_segments_in_a_shard) {
  for_each_plan([](const auto& records, int num_shards, ShardLayout,
                   const auto& buckets) {
    std::vector<int64_t> next(records.size(), 0);
    for (const ShardedBucket& bucket : buckets) {
      ASSERT_EQ(bucket.holdings.size(), static_cast<size_t>(num_shards));
      for (int shard = 0; shard < num_shards; ++shard) {
        int64_t end = 0;
        for (const ShardHolding& held : bucket.holdings[shard]) {
          EXPECT_GE(held.offset, 0);
          EXPECT_LE(held.numel, held.room);
          EXPECT_LE(held.offset + held.room, bucket.shard_numel);
          if (held.room > 0) {
            EXPECT_GE(held.offset, end);
            end = held.offset + held.room;
          }
          if (held.numel == 0) continue;
          // Ranks hold neighbouring intervals, ascending.
          EXPECT_EQ(held.begin, next[held.record_idx]);
          next[held.record_idx] += held.numel;
          for (const int64_t i : {int64_t{0}, held.numel - 1}) {
            EXPECT_EQ(flat_offset_of(bucket, held.record_idx, held.begin + i),
                      shard * bucket.shard_numel + held.offset + i);
          }
        }
      }
    }
    for (size_t i = 0; i < records.size(); ++i) {
      EXPECT_EQ(next[i], records[i].local_numel());
    }
  });
}

TEST(ShardLayout, shards_are_aligned_and_balanced) {
  for_each_plan([](const auto& records, int num_shards, ShardLayout layout,
                   const auto& buckets) {
    const BucketPlan plan = plan_buckets(records, kCapBytes);
    ASSERT_EQ(buckets.size(), plan.buckets.size());
    for (size_t b = 0; b < buckets.size(); ++b) {
      const ShardedBucket& bucket = buckets[b];
      const int64_t alignment = slot_alignment(bucket.dtype);
      EXPECT_EQ(bucket.shard_numel % alignment, 0);
      int64_t extra = alignment;  // at most this per shard
      if (layout == ShardLayout::kPerParameter) {
        extra += static_cast<int64_t>(plan.buckets[b].slots.size());
      }
      EXPECT_LE(bucket.shard_numel, plan.buckets[b].numel / num_shards + extra);
    }
  });
}

TEST(ShardLayout, per_parameter_a_rank_has_room_for_equal_parts) {
  for_each_plan([](const auto& records, int num_shards, ShardLayout layout,
                   const auto& buckets) {
    if (layout != ShardLayout::kPerParameter) return;
    for (const ShardedBucket& bucket : buckets) {
      for (int shard = 0; shard < num_shards; ++shard) {
        int64_t offset = 0;
        for (const ShardHolding& held : bucket.holdings[shard]) {
          const int64_t numel = records[held.record_idx].local_numel();
          EXPECT_EQ(held.room, (numel + num_shards - 1) / num_shards);
          EXPECT_EQ(held.offset, offset);
          EXPECT_EQ(held.begin, std::min(shard * held.room, numel));
          offset += held.room;
        }
      }
    }
  });
}

TEST(ShardLayout, an_equal_cut_goes_through_parameters) {
  const std::vector<ParameterRecord> records = {
      whole_record(0, "a", {100}, Dtype::Float),
      whole_record(1, "b", {100}, Dtype::Float)};
  const auto buckets =
      plan_shards(records, kCapBytes, 2, ShardLayout::kEqualCut);
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_EQ(buckets[0].shard_numel, 128);
  EXPECT_EQ(buckets[0].segments,
            (std::vector<Segment>{{1, 0, 0, 100}, {0, 128, 0, 100}}));
  const auto three = plan_shards(records, kCapBytes, 3, ShardLayout::kEqualCut);
  EXPECT_EQ(three[0].shard_numel, 128);
  const auto four = plan_shards(records, kCapBytes, 4, ShardLayout::kEqualCut);
  EXPECT_EQ(four[0].shard_numel, 64);
  EXPECT_EQ(four[0].holdings[1],
            (std::vector<ShardHolding>{{1, 64, 36, 0, 36}, {0, 0, 0, 64, 0}}));
}

TEST(ShardLayout, nothing_cannot_be_divided_over) {
  EXPECT_THROW(plan_shards({}, kCapBytes, 0, ShardLayout::kEqualCut),
               ValueError);
  auto narrow = whole_record(0, "a", {3}, Dtype::Double);
  narrow.accumulation_dtype = Dtype::Float;
  EXPECT_THROW(plan_shards({narrow}, kCapBytes, 2, ShardLayout::kEqualCut),
               ValueError);
}

}  // namespace
}  // namespace smp::gradients
