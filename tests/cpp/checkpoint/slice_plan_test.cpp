#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/checkpoint/slice_plan.h"
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

/// The naive truth: the flat indices that a part holds, element by element.
Elements elements_of(const Shape& shape, const Part& part) {
  const Shape& view = part.view.empty() ? shape : part.view;
  const ShardInterval& slice = part.interval;
  Elements in_slice;
  for (int64_t flat = 0; flat < numel(view); ++flat) {
    int64_t index = flat;
    if (slice.dim != ShardInterval::kFlat) {
      int64_t inner = 1;
      for (size_t d = slice.dim + 1; d < view.size(); ++d) inner *= view[d];
      index = flat / inner % view[slice.dim];
    }
    if (index >= slice.begin && index < slice.end) in_slice.push_back(flat);
  }
  return {in_slice.begin() + part.begin,
          in_slice.begin() + part.begin + part.numel};
}

/// Runs a plan on buffers whose elements are their own flat index.
Elements execute(const Shape& shape, const std::vector<Part>& stored,
                 const std::vector<SliceRead>& plan, size_t num_wanted) {
  std::vector<Elements> sources;
  for (const auto& part : stored) sources.push_back(elements_of(shape, part));
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

/// A layout: `num_slices` cuts of a dim, each in `num_shards` flat pieces.
std::vector<Part> layout(const Shape& shape, int dim, int num_slices,
                         int num_shards) {
  std::vector<Part> parts;
  for (int s = 0; s < num_slices; ++s) {
    const auto slice =
        dim == ShardInterval::kFlat
            ? ShardInterval::flat(numel(shape), num_slices, s)
            : ShardInterval::even(shape[dim], num_slices, s, dim);
    const int64_t count = numel(topology::shard_shape(shape, slice));
    for (int i = 0; i < num_shards; ++i) {
      const auto cut = ShardInterval::flat(count, num_shards, i);
      parts.push_back({slice, cut.begin, cut.size()});
    }
  }
  return parts;
}

Part whole_slice(const Shape& shape, const ShardInterval& slice) {
  return {slice, 0, numel(topology::shard_shape(shape, slice))};
}

TEST(SlicePlan, AnyLayoutIsReadFromAnyOther) {
  const Shape shape = {4, 6, 10};
  int num_plans = 0;
  for (int from = ShardInterval::kFlat; from < 3; ++from) {
    for (int to = ShardInterval::kFlat; to < 3; ++to) {
      for (const int num_stored : {1, 2}) {
        for (const int num_shards : {1, 3, 7}) {
          const auto stored = layout(shape, from, num_stored, num_shards);
          for (const auto& wanted : layout(shape, to, 2, num_shards % 4)) {
            const Elements expected = elements_of(shape, wanted);
            const auto plan = plan_part_reads(shape, stored, wanted);
            ASSERT_EQ(execute(shape, stored, plan, expected.size()), expected)
                << "from dim " << from << " to " << wanted.describe();
            ++num_plans;
          }
        }
      }
    }
  }
  EXPECT_GT(num_plans, 400);
}

TEST(SlicePlan, RandomPartsGiveTheElementsOrNameAGap) {
  std::mt19937 random(11);
  const auto upto = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
  };
  int num_complete = 0;
  int num_gaps = 0;
  int num_views = 0;
  for (int round = 0; round < 4000; ++round) {
    Shape shape(upto(3));
    for (auto& size : shape) size = upto(9) == 0 ? 0 : 1 + upto(4);
    const auto random_part = [&] {
      Part part;
      Shape view = shape;
      if (upto(3) == 0 && !shape.empty() && shape[0] == 4) {
        view.insert(view.begin(), 2);
        view[1] = 2;
        part.view = view;
        ++num_views;
      }
      const int dim = static_cast<int>(upto(view.size())) - 1;
      const int64_t extent = dim < 0 ? numel(view) : view[dim];
      const int64_t a = upto(extent);
      const int64_t b = upto(extent);
      part.interval = {dim, std::min(a, b), std::max(a, b), extent};
      const int64_t count = numel(topology::shard_shape(view, part.interval));
      part.begin = upto(count);
      part.numel = upto(count - part.begin);
      return part;
    };
    std::vector<Part> stored(upto(6));
    for (auto& part : stored) part = random_part();
    if (upto(2) == 0) {
      stored.push_back(
          {ShardInterval::flat(numel(shape), 1, 0), 0, numel(shape)});
    }
    const Part wanted = random_part();
    const Elements expected = elements_of(shape, wanted);
    std::vector<bool> have(numel(shape), false);
    for (const auto& part : stored) {
      for (const int64_t e : elements_of(shape, part)) have[e] = true;
    }
    const bool complete = std::all_of(expected.begin(), expected.end(),
                                      [&](int64_t e) { return have[e]; });
    if (!complete) {
      ++num_gaps;
      ASSERT_THROW(plan_part_reads(shape, stored, wanted), ValueError);
      continue;
    }
    num_complete += expected.empty() ? 0 : 1;
    const auto plan = plan_part_reads(shape, stored, wanted);
    ASSERT_EQ(execute(shape, stored, plan, expected.size()), expected)
        << wanted.describe();
  }
  EXPECT_GT(num_complete, 300);
  EXPECT_GT(num_gaps, 500);
  EXPECT_GT(num_views, 100);
}

TEST(SlicePlan, EqualLayoutsNeedOneRead) {
  const Shape shape = {8, 1024};
  const auto stored = layout(shape, 1, 4, 2);
  const auto plan = plan_part_reads(shape, stored, stored[5]);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (SliceRead{5, 0, 0, 4 * 256, 1, 0, 0}));
}

TEST(SlicePlan, ColumnsOfAWholeMatrixAreOneStridedRead) {
  const Shape shape = {1000, 8};
  const auto plan =
      plan_part_reads(shape, {whole_slice(shape, ShardInterval::whole(1000))},
                      whole_slice(shape, ShardInterval::even(8, 4, 1, 1)));
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (SliceRead{0, 2, 0, 2, 1000, 8, 2}));
}

TEST(SlicePlan, ReplicasAreReadOnceFromTheFirst) {
  const auto whole = whole_slice({6}, ShardInterval::whole(6));
  const auto plan = plan_part_reads({6}, {whole, whole}, whole);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].source_idx, 0);
}

TEST(SlicePlan, TheErrorNamesWhatIsMissing) {
  const Part whole = whole_slice({8}, {0, 2, 8, 8});
  try {
    plan_part_reads(
        {8}, {whole_slice({8}, {0, 0, 3, 8}), whole_slice({8}, {0, 5, 8, 8})},
        whole);
    FAIL() << "expected an error";
  } catch (const ValueError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("2 elements"), std::string::npos) << text;
    EXPECT_NE(text.find("[3, 5)"), std::string::npos) << text;
  }
}

TEST(SlicePlan, GroupedRowsAreReadFromTheWholeMatrix) {
  // Query, key and value of 2 rows each; the second of two ranks wants a row
  // of each.
  const Part whole{ShardInterval::flat(6 * 5, 1, 0), 0, 30};
  const Part wanted{ShardInterval::even(2, 2, 1, 1), 0, 15, {3, 2, 5}};
  const auto plan = plan_part_reads({6, 5}, {whole}, wanted);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (SliceRead{0, 5, 0, 5, 3, 10, 5}));
}

TEST(SlicePlan, AShardOfColumnsHasFewRunsHoweverManyRowsThereAre) {
  // 2^40 rows: a plan that walked them all would never end.
  const Shape shape = {int64_t{1} << 40, 8};
  const Part part{ShardInterval::even(8, 2, 1, 1), 3, 10};
  const auto plan = plan_part_reads(shape, {part}, part);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].run_length * plan[0].num_runs, 10);
}

TEST(SlicePlan, RefusesPartsOfAnotherTensor) {
  const auto whole = ShardInterval::whole(8);
  const Part good{whole, 0, 8};
  EXPECT_THROW(plan_part_reads({8}, {good}, {whole, 4, 5}), ValueError);
  EXPECT_THROW(plan_part_reads({8}, {good}, {whole, -1, 2}), ValueError);
  EXPECT_THROW(plan_part_reads({8}, {{whole, 0, 9}}, good), ValueError);
  EXPECT_THROW(plan_part_reads({8}, {good}, {ShardInterval::whole(9), 0, 8}),
               ValueError);
  EXPECT_THROW(
      plan_part_reads({8}, {good}, {ShardInterval::whole(3), 0, 3, {3, 3}}),
      ValueError);
}

}  // namespace
}  // namespace smp::checkpoint
