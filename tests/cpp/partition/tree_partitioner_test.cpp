#include "csrc/partition/tree_partitioner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>

#include "csrc/common/check.h"
#include "csrc/partition/decision_tree.h"
#include "tests/cpp/partition/trees.h"

namespace smp::partition {
namespace {

using testing::find_node;
using testing::gpt_tree;
using testing::GptShape;
using testing::imbalance;

Assignment solve_bytes(const ModuleTree& tree, int num_partitions) {
  return solve(tree, {.num_partitions = num_partitions, .memory_weight = 1});
}

int num_placeable(const ModuleTree& tree) {
  return DecisionTree(tree).most_stages();
}

bool subtree_has_state(const ModuleTree& tree, int idx) {
  if (tree.node(idx).has_state) return true;
  for (int child : tree.node(idx).child_idxs) {
    if (subtree_has_state(tree, child)) return true;
  }
  return false;
}

TEST(Solve, RandomTreesKeepEveryRule) {
  std::mt19937 random(7);
  int num_solved = 0;
  for (int round = 0; round < 400; ++round) {
    const ModuleTree tree =
        testing::random_tree(random, 2 + static_cast<int>(random() % 60));
    const int num_partitions = 1 + static_cast<int>(random() % 8);
    if (num_partitions > num_placeable(tree)) continue;
    ++num_solved;
    const PartitionOptions options{num_partitions, 0.25 * (random() % 5)};
    const Assignment assignment = solve(tree, options);

    ASSERT_EQ(static_cast<int>(assignment.partition_idxs.size()),
              tree.num_nodes());
    EXPECT_EQ(assignment.partition_idxs[0], 0);
    std::set<int> used;
    std::vector<int64_t> bytes(num_partitions, 0);
    for (int idx = 0; idx < tree.num_nodes(); ++idx) {
      const int p = assignment.partition_idxs[idx];
      ASSERT_GE(p, 0);
      ASSERT_LT(p, num_partitions);
      EXPECT_EQ(p, assignment.partition_idxs[tree.first_of_tie(idx)]);
      if (idx > 0 && !subtree_has_state(tree, idx)) {
        EXPECT_EQ(p, assignment.partition_idxs[tree.node(idx).parent_idx]);
      }
      if (tree.node(idx).has_state) used.insert(p);
      bytes[p] += tree.node(idx).param_bytes;
    }
    EXPECT_EQ(static_cast<int>(used.size()), num_partitions);
    const DecisionTree decisions(tree);
    int previous = 0;
    for (int id : decisions.free_units()) {
      const int place = decisions.units()[id].place_idx;
      EXPECT_GE(assignment.partition_idxs[place], previous);
      EXPECT_LE(assignment.partition_idxs[place], previous + 1);
      previous = assignment.partition_idxs[place];
    }
    EXPECT_EQ(assignment.load_bytes, bytes);
    EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}),
              tree.total_param_bytes());

    const Assignment again = solve(tree, options);
    EXPECT_EQ(again.partition_idxs, assignment.partition_idxs);
    EXPECT_EQ(again.hash, assignment.hash);
  }
  EXPECT_GT(num_solved, 200);
}

// The smallest largest segment of all contiguous cuts, by trying them.
double best_largest_segment(const std::vector<double>& costs, int num_segments,
                            size_t begin = 0) {
  if (num_segments == 1) {
    return std::accumulate(costs.begin() + begin, costs.end(), 0.0);
  }
  double best = 1e300;
  double head = 0;
  for (size_t end = begin + 1; end + num_segments - 1 <= costs.size(); ++end) {
    head += costs[end - 1];
    best = std::min(best, std::max(head, best_largest_segment(
                                             costs, num_segments - 1, end)));
  }
  return best;
}

// On a flat chain the result is within 1 / 0.98 of the best contiguous cut:
// the exact cut of the chain finds the best one.
TEST(Solve, FlatChainIsWithinTwoPercentOfTheBestContiguousCut) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const int n = 2 + static_cast<int>(random() % 9);
    ModuleTree tree;
    tree.add_node("", -1, 0, false);
    std::vector<double> costs;
    for (int i = 0; i < n; ++i) {
      costs.push_back(1 + static_cast<double>(random() % 50));
      tree.add_node(std::to_string(i), 0, static_cast<int64_t>(costs.back()),
                    true);
    }
    const int num_partitions = 1 + static_cast<int>(random() % n);
    const double optimum = best_largest_segment(costs, num_partitions);
    const Assignment assignment = solve_bytes(tree, num_partitions);
    const int64_t largest = *std::max_element(assignment.load_bytes.begin(),
                                              assignment.load_bytes.end());
    EXPECT_LE(static_cast<double>(largest), optimum / 0.98 + 1e-6);
  }
}

struct GoldenCase {
  int num_layers;
  double embedding_layers;
  bool tied_head;
  int num_partitions;
  double most_imbalance;  // the best contiguous cut between blocks, plus 1 %
};

class SolveGpt : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(SolveGpt, IsBalancedAndKeepsBlocksWhole) {
  const GoldenCase& c = GetParam();
  const ModuleTree tree =
      gpt_tree({c.num_layers, c.embedding_layers, c.tied_head});
  const Assignment assignment = solve_bytes(tree, c.num_partitions);
  EXPECT_LE(imbalance(assignment), c.most_imbalance)
      << to_text(tree, assignment);
  int previous = 0;
  for (int i = 0; i < c.num_layers; ++i) {
    const int block = find_node(tree, "transformer.h." + std::to_string(i));
    const int p = assignment.partition_idxs[block];
    EXPECT_GE(p, previous) << "blocks are in order";
    previous = p;
    for (int idx = block; idx < block + 8; ++idx) {
      EXPECT_EQ(assignment.partition_idxs[idx], p) << tree.node(idx).name;
    }
  }
  EXPECT_EQ(assignment.partition_idxs[find_node(tree, "transformer.wte")], 0);
  EXPECT_EQ(assignment.partition_idxs[find_node(tree, "lm_head")],
            c.tied_head ? 0 : c.num_partitions - 1);
}

INSTANTIATE_TEST_SUITE_P(
    Golden, SolveGpt,
    ::testing::Values(
        GoldenCase{12, 0.5, true, 2, 1.06}, GoldenCase{12, 0.5, true, 4, 1.14},
        GoldenCase{12, 0.5, true, 8, 1.30}, GoldenCase{24, 2, true, 2, 1.02},
        GoldenCase{24, 2, true, 4, 1.09}, GoldenCase{24, 2, true, 8, 1.24},
        GoldenCase{48, 0.5, true, 2, 1.02}, GoldenCase{48, 0.5, true, 4, 1.04},
        GoldenCase{48, 0.5, true, 8, 1.09},
        // A heavy embedding beside a list of layers.
        GoldenCase{12, 3, true, 4, 1.08}, GoldenCase{12, 6, true, 4, 1.35},
        GoldenCase{12, 7, true, 2, 1.06}, GoldenCase{12, 3, false, 4, 1.12},
        GoldenCase{48, 1, false, 8, 1.13}));

TEST(Solve, GoldenText) {
  EXPECT_EQ(to_text(gpt_tree({}), solve_bytes(gpt_tree({}), 4)),
            "Partition assignments:\n"
            "pp_rank 0: 3610 bytes (23.1 %): (root), (transformer), "
            "transformer.wte, transformer.wpe, (transformer.h), "
            "transformer.h.[0-1], lm_head\n"
            "pp_rank 1: 3600 bytes (23.1 %): transformer.h.[2-4]\n"
            "pp_rank 2: 4800 bytes (30.7 %): transformer.h.[5-8]\n"
            "pp_rank 3: 3602 bytes (23.1 %): transformer.h.[9-11], "
            "transformer.ln_f");
}

// Two stacks beside each other and a list between heavy neighbours: a partition
// for each of them would be far from balanced.
TEST(Solve, ListsAreCutWhereverThatBalances) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("embedding", 0, 650, true);
  const int stack = tree.add_node("stack", 0, 0, false);
  const int list = tree.add_node("layers", stack, 0, false, 0, NodeKind::kList);
  for (int i = 0; i < 8; ++i) tree.add_node("x", list, 105, true);
  tree.add_node("head", 0, 650, true);
  EXPECT_EQ(solve_bytes(tree, 2).load_bytes,
            (std::vector<int64_t>{1070, 1070}));

  ModuleTree two;
  two.add_node("", -1, 0, false);
  two.add_node("shared", 0, 300, true);
  for (const char* name : {"encoder", "decoder"}) {
    const int part = two.add_node(name, 0, 0, false);
    const int layers = two.add_node("list", part, 0, false, 0, NodeKind::kList);
    for (int i = 0; i < 6; ++i) two.add_node("x", layers, 50, true);
  }
  EXPECT_EQ(solve_bytes(two, 2).load_bytes, (std::vector<int64_t>{450, 450}));
}

TEST(Solve, BlocksAreCutWhenThereAreMorePartitionsThanBlocks) {
  const ModuleTree tree = gpt_tree({.num_layers = 2, .embedding_layers = 0.5});
  const Assignment assignment = solve_bytes(tree, 4);
  EXPECT_LE(imbalance(assignment), 1.7) << to_text(tree, assignment);
}

TEST(Solve, BytesOfATiedNodeCountAtTheFirstOwner) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  const int a = tree.add_node("a", 0, 100, true);
  tree.add_node("b", 0, 60, true);
  tree.add_node("c", 0, 60, true);
  const int head = tree.add_node("head", 0, 20, true);  // a bias of its own
  tree.tie(a, head);
  const Assignment assignment = solve_bytes(tree, 2);
  EXPECT_EQ(assignment.partition_idxs, (std::vector<int>{0, 0, 1, 1, 0}));
  EXPECT_EQ(assignment.load_bytes, (std::vector<int64_t>{120, 120}));
}

TEST(Solve, NothingBelowAnIndivisibleNodeIsCut) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  const int list =
      tree.add_node("list", 0, 0, false, 0, NodeKind::kIndivisible);
  for (int i = 0; i < 4; ++i) tree.add_node("x", list, 100, true);
  tree.add_node("head", 0, 1, true);
  EXPECT_EQ(solve_bytes(tree, 2).partition_idxs,
            (std::vector<int>{0, 0, 0, 0, 0, 0, 1}));
  EXPECT_THROW(solve_bytes(tree, 3), ValueError);
}

TEST(Solve, TieIntoAnIndivisibleSubtreeMovesAllOfIt) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("a", 0, 100, true);
  tree.add_node("b", 0, 300, true);
  const int whole =
      tree.add_node("whole", 0, 0, false, 0, NodeKind::kIndivisible);
  tree.add_node("whole.x", whole, 50, true);
  const int inner = tree.add_node("whole.y", whole, 50, true);
  tree.tie(1, inner);
  EXPECT_EQ(solve_bytes(tree, 2).partition_idxs,
            (std::vector<int>{0, 0, 1, 0, 0, 0}));
}

TEST(Solve, MemoryWeightMixesBytesAndTime) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("a", 0, 30, true, 1);
  tree.add_node("b", 0, 10, true, 1);
  tree.add_node("c", 0, 10, true, 1);
  tree.add_node("d", 0, 10, true, 1);
  EXPECT_EQ(solve(tree, {2, 1.0}).partition_idxs,
            (std::vector<int>{0, 0, 1, 1, 1}));
  EXPECT_EQ(solve(tree, {2, 0.0}).partition_idxs,
            (std::vector<int>{0, 0, 0, 1, 1}));
}

TEST(Solve, ModulesWithoutTimesAreBalancedByBytesWhateverTheWeight) {
  const ModuleTree tree = gpt_tree({});
  EXPECT_EQ(solve(tree, {4, 0.0}).partition_idxs,
            solve(tree, {4, 1.0}).partition_idxs);
}

TEST(Solve, MorePartitionsThanModulesSaysWhatToDo) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("a", 0, 1, true);
  tree.add_node("relu", 0, 0, false);
  tree.add_node("b", 0, 1, true);
  EXPECT_EQ(solve_bytes(tree, 2).partition_idxs,
            (std::vector<int>{0, 0, 0, 1}));
  try {
    solve_bytes(tree, 3);
    FAIL() << "expected ValueError";
  } catch (const ValueError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("has 2 modules with parameters"), std::string::npos);
    EXPECT_NE(text.find("pipeline_parallel_degree to at most 2"),
              std::string::npos);
  }
}

TEST(Solve, RejectsBadOptions) {
  const ModuleTree tree = gpt_tree({});
  EXPECT_THROW(solve(ModuleTree(), {1, 0.5}), ValueError);
  EXPECT_THROW(solve(tree, {0, 0.5}), ValueError);
  EXPECT_THROW(solve(tree, {2, 1.5}), ValueError);
  EXPECT_THROW(solve(tree, {2, -0.1}), ValueError);
  EXPECT_THROW(solve(tree, {2, std::nan("")}), ValueError);
}

}  // namespace
}  // namespace smp::partition
