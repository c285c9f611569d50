#include "csrc/topology/shard_interval.h"

#include <gtest/gtest.h>

#include "csrc/common/check.h"

namespace smp::topology {
namespace {

TEST(ShardInterval, EvenPartsTileTheDim) {
  int64_t next = 0;
  for (int i = 0; i < 4; ++i) {
    const ShardInterval part = ShardInterval::even(12, 4, i, 1);
    EXPECT_EQ(part.begin, next);
    EXPECT_EQ(part.size(), 3);
    EXPECT_EQ(part.dim, 1);
    next = part.end;
  }
  EXPECT_EQ(next, 12);
}

TEST(ShardInterval, EvenRefusesARemainder) {
  EXPECT_THROW(ShardInterval::even(10, 4, 0), ValueError);
  EXPECT_THROW(ShardInterval::even(8, 4, 4), ValueError);
}

TEST(ShardInterval, FlatPartsTileAnyNumberOfElements) {
  for (int64_t numel = 0; numel <= 20; ++numel) {
    for (int num_shards = 1; num_shards <= 7; ++num_shards) {
      int64_t next = 0;
      for (int i = 0; i < num_shards; ++i) {
        const ShardInterval part = ShardInterval::flat(numel, num_shards, i);
        ASSERT_EQ(part.begin, next);
        ASSERT_LE(part.size(), (numel + num_shards - 1) / num_shards);
        next = part.end;
      }
      ASSERT_EQ(next, numel);
    }
  }
}

TEST(ShardInterval, ShapeOfASliceReplacesTheCutDim) {
  EXPECT_EQ(shard_shape({4, 6}, ShardInterval::even(6, 3, 1, 1)),
            (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(shard_shape({4, 6}, ShardInterval::flat(24, 5, 4)),
            (std::vector<int64_t>{4}));
  EXPECT_THROW(shard_shape({4, 6}, ShardInterval::whole(4, 1)), ValueError);
  EXPECT_THROW(shard_shape({4, 6}, ShardInterval::whole(4, 2)), ValueError);
}

TEST(ShardInterval, DescribesItself) {
  EXPECT_EQ(ShardInterval::even(16, 4, 1).describe(), "dim 0 [4, 8) of 16");
  EXPECT_EQ(ShardInterval::flat(400, 4, 0).describe(), "flat [0, 100) of 400");
}

}  // namespace
}  // namespace smp::topology
