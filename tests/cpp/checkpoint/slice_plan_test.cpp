#include "csrc/checkpoint/slice_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "csrc/common/check.h"

namespace smp::checkpoint {
namespace {

using topology::ShardInterval;
using Shape = std::vector<int64_t>;
using Elements = std::vector<int64_t>;

int64_t numel(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

/// The naive truth: the flat indices that a slice holds, element by element.
Elements elements_of(const Shape& shape, const ShardInterval& slice) {
  Elements result;
  for (int64_t flat = 0; flat < numel(shape); ++flat) {
    int64_t index = flat;
    if (slice.dim != ShardInterval::kFlat) {
      int64_t inner = 1;
      for (size_t d = slice.dim + 1; d < shape.size(); ++d) inner *= shape[d];
      index = flat / inner % shape[slice.dim];
    }
    if (index >= slice.begin && index < slice.end) result.push_back(flat);
  }
  return result;
}

/// Runs a plan on buffers whose elements are their own flat index.
Elements execute(const Shape& shape, const std::vector<ShardInterval>& stored,
                 const std::vector<SliceRead>& plan, size_t num_wanted) {
  std::vector<Elements> sources;
  for (const auto& slice : stored) sources.push_back(elements_of(shape, slice));
  Elements result(num_wanted, -1);
  for (const SliceRead& read : plan) {
    for (int64_t run = 0; run < read.num_runs; ++run) {
      for (int64_t i = 0; i < read.run_length; ++i) {
        int64_t& out = result.at(read.dst_offset + run * read.dst_stride + i);
        EXPECT_EQ(out, -1) << "written twice";
        out = sources.at(read.source_idx)
                  .at(read.src_offset + run * read.src_stride + i);
      }
    }
  }
  return result;
}

std::vector<ShardInterval> all_shards(const Shape& shape, int dim,
                                      int num_shards) {
  std::vector<ShardInterval> result;
  for (int i = 0; i < num_shards; ++i) {
    result.push_back(dim == ShardInterval::kFlat
                         ? ShardInterval::flat(numel(shape), num_shards, i)
                         : ShardInterval::even(shape[dim], num_shards, i, dim));
  }
  return result;
}

TEST(SlicePlan, AnyLayoutIsReadFromAnyOther) {
  const Shape shape = {4, 6, 12};
  for (int from = ShardInterval::kFlat; from < 3; ++from) {
    for (int to = ShardInterval::kFlat; to < 3; ++to) {
      for (const int num_stored : {1, 2}) {
        const auto stored = all_shards(shape, from, num_stored);
        for (const auto& wanted : all_shards(shape, to, 2)) {
          const Elements expected = elements_of(shape, wanted);
          const auto plan = plan_slice_reads(shape, stored, wanted);
          ASSERT_EQ(execute(shape, stored, plan, expected.size()), expected)
              << "from dim " << from << " to " << wanted.describe();
        }
      }
    }
  }
}

TEST(SlicePlan, RandomSlicesGiveTheElementsOrNameAGap) {
  std::mt19937 random(7);
  const auto upto = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
  };
  int num_complete = 0;
  int num_gaps = 0;
  for (int round = 0; round < 3000; ++round) {
    Shape shape(1 + upto(2));
    for (auto& size : shape) size = upto(5);
    const auto slice = [&] {
      const int dim = static_cast<int>(upto(shape.size())) - 1;
      const int64_t extent = dim < 0 ? numel(shape) : shape[dim];
      const int64_t a = upto(extent);
      const int64_t b = upto(extent);
      return ShardInterval{dim, std::min(a, b), std::max(a, b), extent};
    };
    std::vector<ShardInterval> stored(upto(5));
    for (auto& s : stored) s = slice();
    const ShardInterval wanted = slice();
    const Elements expected = elements_of(shape, wanted);
    std::vector<bool> have(numel(shape), false);
    for (const auto& s : stored) {
      for (const int64_t e : elements_of(shape, s)) have[e] = true;
    }
    bool complete = true;
    for (const int64_t e : expected) complete = complete && have[e];
    if (!complete) {
      ++num_gaps;
      ASSERT_THROW(plan_slice_reads(shape, stored, wanted), ValueError);
      continue;
    }
    num_complete += expected.empty() ? 0 : 1;
    const auto plan = plan_slice_reads(shape, stored, wanted);
    ASSERT_EQ(execute(shape, stored, plan, expected.size()), expected);
  }
  EXPECT_GT(num_complete, 100);
  EXPECT_GT(num_gaps, 100);
}

TEST(SlicePlan, EqualLayoutsNeedOneRead) {
  const Shape shape = {8, 1024};
  const auto stored = all_shards(shape, 1, 4);
  const auto plan = plan_slice_reads(shape, stored, stored[2]);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (SliceRead{2, 0, 0, 8 * 256, 1, 0, 0}));
}

TEST(SlicePlan, ColumnsOfAWholeMatrixAreOneStridedRead) {
  const Shape shape = {1000, 8};
  const auto plan = plan_slice_reads(shape, {ShardInterval::whole(1000)},
                                     ShardInterval::even(8, 4, 1, 1));
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (SliceRead{0, 2, 0, 2, 1000, 8, 2}));
}

TEST(SlicePlan, ReplicasAreReadOnceFromTheFirst) {
  const auto whole = ShardInterval::whole(6);
  const auto plan = plan_slice_reads({6}, {whole, whole}, whole);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].source_idx, 0);
}

TEST(SlicePlan, TheErrorNamesWhatIsMissing) {
  try {
    plan_slice_reads({8}, {{0, 0, 3, 8}, {0, 5, 8, 8}}, {0, 2, 8, 8});
    FAIL() << "expected an error";
  } catch (const ValueError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("2 elements"), std::string::npos) << text;
    EXPECT_NE(text.find("[3, 5)"), std::string::npos) << text;
  }
}

TEST(SlicePlan, RefusesIntervalsOfAnotherTensor) {
  EXPECT_THROW(
      plan_slice_reads({8}, {ShardInterval::whole(9)}, ShardInterval::whole(8)),
      ValueError);
  EXPECT_THROW(plan_slice_reads({8}, {ShardInterval::whole(8)},
                                ShardInterval::whole(8, 1)),
               ValueError);
}

}  // namespace
}  // namespace smp::checkpoint
