#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/partition/dhondt.h"
#include "csrc/partition/segment_split.h"

namespace smp::partition {
namespace {

double largest_segment(const std::vector<double>& costs,
                       const std::vector<int>& ends) {
  double largest = 0;
  int begin = 0;
  for (int end : ends) {
    largest = std::max(largest, std::accumulate(costs.begin() + begin,
                                                costs.begin() + end, 0.0));
    begin = end;
  }
  return largest;
}

// Best of all cuts, by trying them.
double exhaustive_optimum(const std::vector<double>& costs, int num_segments,
                          size_t begin = 0) {
  if (num_segments == 1) {
    return std::accumulate(costs.begin() + begin, costs.end(), 0.0);
  }
  double best = 1e300;
  double head = 0;
  for (size_t end = begin + 1; end + num_segments - 1 <= costs.size(); ++end) {
    head += costs[end - 1];
    best = std::min(
        best, std::max(head, exhaustive_optimum(costs, num_segments - 1, end)));
  }
  return best;
}

TEST(Dhondt, GivesSeatsInProportion) {
  EXPECT_EQ(dhondt({3, 12}, 4), (std::vector<int>{1, 3}));
  EXPECT_EQ(dhondt({100, 80, 30, 20}, 8), (std::vector<int>{4, 3, 1, 0}));
  EXPECT_EQ(dhondt({1, 0}, 3), (std::vector<int>{3, 0}));
}

TEST(Dhondt, LowestIndexWinsTies) {
  EXPECT_EQ(dhondt({1, 1, 1}, 2), (std::vector<int>{1, 1, 0}));
  EXPECT_EQ(dhondt({2, 1}, 2), (std::vector<int>{2, 0}));
}

TEST(SegmentSplit, EndsAreIncreasingAndLargestSegmentIsMinimal) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int n = 1 + static_cast<int>(random() % 10);
    std::vector<double> costs(n);
    for (double& cost : costs) cost = static_cast<double>(random() % 20);
    const int num_segments = 1 + static_cast<int>(random() % n);
    const std::vector<int> ends = split_segments(costs, num_segments);
    ASSERT_EQ(static_cast<int>(ends.size()), num_segments);
    EXPECT_EQ(ends.back(), n);
    EXPECT_GT(ends.front(), 0);
    for (int k = 1; k < num_segments; ++k) EXPECT_LT(ends[k - 1], ends[k]);
    EXPECT_NEAR(largest_segment(costs, ends),
                exhaustive_optimum(costs, num_segments), 1e-6);
  }
}

TEST(SegmentSplit, EqualMaximaAreEvenedOut) {
  // The 6 alone decides the maximum; the rest must still be cut in halves.
  EXPECT_EQ(split_segments({6, 1, 1, 1, 1}, 3), (std::vector<int>{1, 3, 5}));
}

TEST(SegmentSplit, MoreSegmentsThanItemsIsOurBug) {
  EXPECT_THROW(split_segments({1, 2}, 3), InternalError);
}

}  // namespace
}  // namespace smp::partition
