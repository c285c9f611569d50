#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "csrc/partition/objective.h"
#include "csrc/partition/tree_partitioner.h"
#include "tests/cpp/partition/models.h"
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
int num_optimal_of_200(bool leads) {
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
    EXPECT_LE(load, 1.02 * optimum) << "tree " << num_trees;
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

// The best contiguous cut of a sequence whose items weigh differently on each
// stage, by the plain recursion.
double exact_contiguous(const std::vector<std::vector<double>>& loads) {
  const size_t num_stages = loads.size();
  const size_t n = loads[0].size();
  std::vector<double> best(n + 1, 1e300);
  best[0] = 0;
  for (size_t k = 0; k < num_stages; ++k) {
    std::vector<double> next(n + 1, 1e300);
    for (size_t end = 1; end <= n; ++end) {
      double sum = 0;
      for (size_t begin = end; begin-- > 0;) {
        sum += loads[k][begin];
        next[end] = std::min(next[end], std::max(best[begin], sum));
      }
    }
    best = next;
  }
  return best[n];
}

struct RealCase {
  const char* name;
  const testing::ModelShape* shape;
  int num_partitions;
};

class QualityOfRealShapes : public ::testing::TestWithParam<RealCase> {};

PartitionOptions options_for(int num_partitions, double memory_weight) {
  PartitionOptions options;
  options.num_partitions = num_partitions;
  options.memory_weight = memory_weight;
  for (int r = 0; r < num_partitions; ++r) {
    options.kept_microbatches.push_back(num_partitions - r);
  }
  return options;
}

// Loads per stage of halves of blocks, or of whole blocks; a tied head is with
// the embedding.
std::vector<std::vector<double>> loads_of_items(const testing::ModelTree& model,
                                                const PartitionOptions& options,
                                                bool whole_blocks) {
  const DecisionTree decisions(model.tree);
  const Objective objective(decisions, options);
  std::vector<std::vector<double>> loads(options.num_partitions);
  std::vector<bool> counted(decisions.num_units(), false);
  std::vector<bool> node_counted(model.tree.num_nodes(), false);
  int previous_block = -1;
  for (size_t i = 0; i < model.halves.size(); ++i) {
    Cost cost;
    for (int node : model.halves[i]) {
      const int id = decisions.unit_of(node);
      if (!counted[id]) cost += objective.cost_of_unit(id);
      counted[id] = true;
      // The module that holds the matrices comes along with the first.
      const int parent = model.tree.node(node).parent_idx;
      const bool inside = model.half_blocks[i] >= 0 &&
                          parent != model.blocks[model.half_blocks[i]];
      if (inside && !node_counted[parent]) {
        cost += objective.cost_of_owner(parent);
        node_counted[parent] = true;
      }
    }
    const int block = model.half_blocks[i];
    const bool joins = whole_blocks && block >= 0 && block == previous_block;
    for (int k = 0; k < options.num_partitions; ++k) {
      if (!joins) loads[k].push_back(0);
      loads[k].back() += objective.load(cost, 0, k);
    }
    previous_block = block;
  }
  return loads;
}

TEST_P(QualityOfRealShapes, SlowestIsWithinTwoPercentOfTheExactCut) {
  const testing::ModelTree model(*GetParam().shape);
  for (double memory_weight : {0.0, 0.2, 0.8, 1.0}) {
    const PartitionOptions options =
        options_for(GetParam().num_partitions, memory_weight);
    const Assignment assignment = solve(model.tree, options);
    const double load = evaluate(model.tree, assignment, options).largest_load;
    const double optimum =
        exact_contiguous(loads_of_items(model, options, false));
    EXPECT_LE(load, 1.02 * optimum) << "memory_weight " << memory_weight << "\n"
                                    << to_text(model.tree, assignment);
  }
}

TEST_P(QualityOfRealShapes, BlocksAreCutOnlyIfThatIsNeeded) {
  const testing::ModelTree model(*GetParam().shape);
  const PartitionOptions options = options_for(GetParam().num_partitions, 0.8);
  const Assignment assignment = solve(model.tree, options);
  const double between = exact_contiguous(loads_of_items(model, options, true));
  const double inside = exact_contiguous(loads_of_items(model, options, false));
  const DecisionTree decisions(model.tree);
  int num_cut = 0;
  for (int block : model.blocks) {
    for (int id : decisions.below(block)) {
      const int place = decisions.units()[id].place_idx;
      if (assignment.partition_idxs[place] !=
          assignment.partition_idxs[block]) {
        ++num_cut;
        EXPECT_EQ(assignment.partition_idxs[block], 0)
            << "split: at the driver";
        break;
      }
    }
  }
  const double load = evaluate(model.tree, assignment, options).largest_load;
  if (num_cut > 0) {
    EXPECT_GT(between, load * 1.01) << "blocks were cut for nothing";
  } else {
    EXPECT_LE(load, 1.02 * inside);
  }
}

std::vector<RealCase> real_cases() {
  std::vector<RealCase> cases;
  for (int p : {2, 4, 8, 16}) {
    cases.push_back({"Gpt2Xl", &testing::kGpt2Xl, p});
    cases.push_back({"GptJ6B", &testing::kGptJ, p});
    cases.push_back({"Llama8B", &testing::kLlama8b, p});
    cases.push_back({"T5Of3B", &testing::kT53b, p});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Models, QualityOfRealShapes,
                         ::testing::ValuesIn(real_cases()),
                         [](const auto& info) {
                           return std::string(info.param.name) + "Over" +
                                  std::to_string(info.param.num_partitions);
                         });

// With transfers that cost as much as a tenth of the arithmetic, against every
// cut in two between halves of blocks.
TEST(Quality, TransfersCountInTheCutOfT5) {
  testing::ModelTree model(testing::kT53b);
  model.tree.set_compute_per_byte(20000);
  const PartitionOptions options = options_for(2, 0.2);
  const DecisionTree decisions(model.tree);
  const Objective objective(decisions, options);
  double optimum = 1e300;
  std::vector<int> unit_stages(decisions.num_units(), 1);
  // The head is with the embedding, and the second stage needs something.
  for (size_t i = 0; i + 2 < model.halves.size(); ++i) {
    for (int node : model.halves[i]) unit_stages[decisions.unit_of(node)] = 0;
    const Evaluation evaluation =
        objective.evaluate(decisions.complete(unit_stages));
    EXPECT_GT(evaluation.crossing_bytes, 0);
    optimum = std::min(optimum, evaluation.largest_load);
  }
  const double load =
      evaluate(model.tree, solve(model.tree, options), options).largest_load;
  EXPECT_LE(load, 1.02 * optimum);
}

}  // namespace
}  // namespace smp::partition
