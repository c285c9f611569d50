#include "csrc/gradients/bucket_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "csrc/common/check.h"

namespace smp::gradients {
namespace {

using Dtype = c10::ScalarType;

std::vector<ParameterRecord> random_records(unsigned seed) {
  std::mt19937 random(seed);
  auto below = [&](int n) { return static_cast<int>(random() % n); };
  const c10::ScalarType dtypes[] = {Dtype::Float, Dtype::Double,
                                    Dtype::BFloat16};
  std::vector<ParameterRecord> records(below(40));
  for (size_t i = 0; i < records.size(); ++i) {
    std::vector<int64_t> shape(below(3));
    for (int64_t& size : shape) size = below(50);
    records[i] = whole_record(static_cast<int>(i), "p" + std::to_string(i),
                              shape, dtypes[below(3)], 1 + below(2));
    if (below(4) == 0) records[i].group = ReductionGroup::kRdp;
  }
  return records;
}

TEST(BucketPlan, places_every_record_once_aligned_and_without_overlap) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const auto records = random_records(seed);
    const BucketPlan plan = plan_buckets(records, 4096);
    ASSERT_EQ(plan.places.size(), records.size());
    std::set<int> seen;
    for (const Bucket& bucket : plan.buckets) {
      ASSERT_FALSE(bucket.slots.empty());
      const int64_t item_bytes = c10::elementSize(bucket.dtype);
      int64_t end = 0;
      for (const BucketSlot& slot : bucket.slots) {
        EXPECT_TRUE(seen.insert(slot.record_idx).second);
        EXPECT_EQ(slot.offset * item_bytes % kSlotAlignmentBytes, 0);
        EXPECT_GE(slot.offset, end);
        EXPECT_EQ(slot.numel, records[slot.record_idx].local_numel());
        end = slot.offset + slot.numel;
        EXPECT_EQ(records[slot.record_idx].dtype, bucket.dtype);
        EXPECT_EQ(records[slot.record_idx].group, bucket.group);
        EXPECT_EQ(records[slot.record_idx].divisor, bucket.divisor);
      }
      EXPECT_GE(bucket.numel, end);
      EXPECT_TRUE(bucket.slots.size() == 1 ||
                  bucket.numel * item_bytes <= 4096);
    }
    EXPECT_EQ(seen.size(), records.size());
    for (size_t i = 0; i < records.size(); ++i) {
      const SlotPlace place = plan.places[i];
      EXPECT_EQ(plan.buckets[place.bucket_idx].slots[place.slot_idx].record_idx,
                static_cast<int>(i));
    }
  }
}

TEST(BucketPlan, buckets_are_in_the_order_in_which_backward_completes_them) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    const BucketPlan plan = plan_buckets(random_records(seed), 4096);
    for (const Bucket& bucket : plan.buckets) {
      for (size_t s = 1; s < bucket.slots.size(); ++s) {
        EXPECT_LT(bucket.slots[s].record_idx, bucket.slots[s - 1].record_idx);
      }
    }
    for (size_t b = 1; b < plan.buckets.size(); ++b) {
      EXPECT_LT(plan.buckets[b].slots.back().record_idx,
                plan.buckets[b - 1].slots.back().record_idx);
    }
  }
}

TEST(BucketPlan, a_parameter_larger_than_the_cap_gets_its_own_bucket) {
  const std::vector<ParameterRecord> records = {
      whole_record(0, "small", {2}, Dtype::Float),
      whole_record(1, "large", {1000}, Dtype::Float),
      whole_record(2, "last", {2}, Dtype::Float)};
  const BucketPlan plan = plan_buckets(records, 512);
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_EQ(plan.buckets[0].slots[0].record_idx, 2);
  EXPECT_EQ(plan.buckets[1].slots[0].record_idx, 1);
  EXPECT_EQ(plan.buckets[2].slots[0].record_idx, 0);
}

TEST(BucketPlan, a_slice_takes_the_room_of_the_slice) {
  ParameterRecord record = whole_record(0, "w", {8, 6}, Dtype::Float);
  record.interval = topology::ShardInterval::even(8, 4, 1);
  EXPECT_EQ(record.local_shape(), (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(plan_buckets({record}, 4096).buckets[0].slots[0].numel, 12);
}

TEST(BucketPlan, refuses_what_cannot_be_laid_out) {
  const auto good = whole_record(0, "a", {2}, Dtype::Float);
  EXPECT_THROW(plan_buckets({good}, 0), ValueError);
  EXPECT_THROW(plan_buckets({good, good}, 64), ValueError);
  auto twice = good;
  twice.index = 1;
  EXPECT_THROW(plan_buckets({good, twice}, 64), ValueError);
  EXPECT_THROW(plan_buckets({whole_record(0, "a", {2}, Dtype::Float, 0)}, 64),
               ValueError);
}

}  // namespace
}  // namespace smp::gradients
