#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "csrc/partition/objective.h"
#include "csrc/partition/tree_partitioner.h"
#include "tests/cpp/partition/trees.h"

namespace smp::partition {
namespace {

// The smallest largest load over every assignment that the rules allow: units
// in the order of execution on stages that do not fall, each with a unit or
// more. Everything else follows from the units.
double brute_force(const DecisionTree& decisions,
                   const PartitionOptions& options) {
  const Objective objective(decisions, options);
  const std::vector<int>& free_units = decisions.free_units();
  const int n = static_cast<int>(free_units.size());
  const int num_stages = options.num_stages();
  std::vector<int> unit_stages(decisions.num_units(), 0);
  double best = 1e300;
  auto consider = [&] {
    const Evaluation evaluation =
        objective.evaluate(decisions.complete(unit_stages));
    best = std::min(best, evaluation.largest_load);
  };
  std::function<void(int, int)> place = [&](int i, int stage) {
    if (i == n) {
      if (stage == num_stages - 1) consider();
      return;
    }
    for (int next : {stage, stage + 1}) {
      if (next >= num_stages) continue;
      // Only what is pinned at the beginning makes a free unit needless there.
      if (i == 0 && next > 0 && !decisions.units()[0].pinned) continue;
      unit_stages[free_units[i]] = next;
      place(i + 1, next);
    }
  };
  place(0, 0);
  return best;
}

// The number of 200 random trees for which the best is found.
int num_optimal_of_200(bool leads, bool uneven = false) {
  std::mt19937 random(2024);
  int num_trees = 0;
  int num_optimal = 0;
  double worst = 1;
  while (num_trees < 200) {
    const int num_units = 6 + static_cast<int>(random() % 9);
    const ModuleTree tree = testing::random_traced_tree(random, num_units);
    const DecisionTree decisions(tree);
    PartitionOptions options;
    options.num_partitions = 2 + static_cast<int>(random() % 4);
    options.memory_weight = 0.25 * (random() % 5);
    if (leads) {
      options.memory_weight = 0;
      options.lead_weight = 0.1 * (random() % 6);
    }
    for (int r = 0; r < options.num_partitions; ++r) {
      options.kept_microbatches.push_back(options.num_partitions - r);
      if (!uneven) continue;
      options.speeds.push_back(1 + static_cast<double>(random() % 4));
      options.memory_limits.push_back(1 + static_cast<int64_t>(random() % 4));
      options.may_exceed = true;
    }
    if (options.num_partitions > decisions.most_stages()) continue;
    EXPECT_LE(decisions.num_units(), 14);
    EXPECT_GE(testing::depth_of(tree), 3);
    ++num_trees;
    const double optimum = brute_force(decisions, options);
    const double load =
        evaluate(tree, solve(tree, options), options).largest_load;
    EXPECT_GE(load, optimum * (1 - 1e-9)) << "outside of the allowed set";
    worst = std::max(worst, load / optimum);
    if (load < optimum * (1 + 1e-9)) ++num_optimal;
    EXPECT_LE(load, (uneven ? 1.05 : 1.02) * optimum) << "tree " << num_trees;
  }
  ::testing::Test::RecordProperty("worst", std::to_string(worst));
  ::testing::Test::RecordProperty("optimal", num_optimal);
  return num_optimal;
}

TEST(Quality, WithinTwoPercentOfBruteForceOn200RandomTrees) {
  EXPECT_LT(num_optimal_of_200(false), 200)
      << "the shallower cut is never preferred";
}

TEST(Quality, WithinTwoPercentAlsoWithTheLeadOfStagesBefore) {
  EXPECT_GT(num_optimal_of_200(true), 150);
}

TEST(Quality, WithinFivePercentOnDevicesOfDifferentSpeedAndMemory) {
  EXPECT_GT(num_optimal_of_200(false, true), 150);
  EXPECT_GT(num_optimal_of_200(true, true), 150);
}

}  // namespace
}  // namespace smp::partition
