#include "csrc/gradients/flat_bucket.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

namespace smp::gradients {
namespace {

// Three parameters in a bucket that is divided by 3, which rounds.
struct Buckets {
  Buckets(ShardLayout layout, c10::ScalarType dtype) {
    const std::vector<std::vector<int64_t>> shapes = {{7, 5}, {33}, {4, 9}};
    std::vector<ParameterRecord> records;
    for (size_t i = 0; i < shapes.size(); ++i) {
      records.push_back(whole_record(static_cast<int>(i), std::to_string(i),
                                     shapes[i], dtype, 3));
      records.back().accumulation_dtype = at::kFloat;
      like.push_back(at::zeros(shapes[i], dtype));
    }
    const auto plan = plan_shards(records, 1 << 20, 2, layout);
    EXPECT_EQ(plan.size(), 1u);
    for (const ShardHolding& slot : plan[0].holdings[0]) {
      shapes_of_slots.push_back(shapes[slot.record_idx]);
    }
    numel = plan[0].flat_numel();
    at_once = make(plan[0]);
    at_end = make(plan[0]);
  }

  std::unique_ptr<FlatBucket> make(const ShardedBucket& plan) const {
    auto bucket = std::make_unique<FlatBucket>(plan, like);
    bucket->attach(at::full({numel}, 7, at::kFloat));
    return bucket;
  }

  std::vector<at::Tensor> like;
  std::vector<std::vector<int64_t>> shapes_of_slots;
  int64_t numel = 0;
  std::unique_ptr<FlatBucket> at_once, at_end;
};

class FlatBucketTest
    : public testing::TestWithParam<std::pair<ShardLayout, c10::ScalarType>> {};

// Division with a parameter's last gradient gives the same bits as division
// when all gradients are there, next to parameters with fewer gradients and
// with none.
TEST_P(FlatBucketTest, division_may_come_with_the_last_gradient) {
  Buckets buckets(GetParam().first, GetParam().second);
  for (int round = 0; round < 2; ++round) {
    for (int num_last = 0; num_last <= 2; ++num_last) {
      buckets.at_once->reset();
      buckets.at_end->reset();
      for (int slot = 0; slot < 2; ++slot) {
        for (int i = 0; i <= slot; ++i) {
          const at::Tensor grad =
              at::randn(buckets.shapes_of_slots[slot]).to(GetParam().second);
          const bool is_last = i == slot && slot < num_last;
          buckets.at_once->add(slot, grad, is_last ? 3 : 1);
          buckets.at_end->add(slot, grad);
        }
      }
      buckets.at_once->finish(3);
      buckets.at_end->finish(3);
      EXPECT_TRUE(at::equal(buckets.at_once->flat(), buckets.at_end->flat()));
      EXPECT_GT(buckets.at_end->flat().abs().max().item<double>(), 0.1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    layouts, FlatBucketTest,
    testing::Values(std::pair{ShardLayout::kEqualCut, at::kFloat},
                    std::pair{ShardLayout::kEqualCut, at::kBFloat16},
                    std::pair{ShardLayout::kPerParameter, at::kFloat},
                    std::pair{ShardLayout::kPerParameter, at::kBFloat16}));

}  // namespace
}  // namespace smp::gradients
