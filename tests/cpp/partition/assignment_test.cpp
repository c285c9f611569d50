#include "csrc/partition/assignment.h"

#include <gtest/gtest.h>

#include "csrc/common/check.h"
#include "tests/cpp/partition/trees.h"

namespace smp::partition {
namespace {

ModuleTree three_leaves() {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("a", 0, 100, true);
  tree.add_node("b.0", 0, 150, true);
  tree.add_node("b.1", 0, 150, true);
  return tree;
}

TEST(ModuleTree, RejectsUnknownParentsSecondRootsAndNegativeCosts) {
  ModuleTree tree;
  EXPECT_THROW(tree.add_node("", 0, 0, false), ValueError);
  tree.add_node("", -1, 0, false);
  EXPECT_THROW(tree.add_node("a", -1, 0, false), ValueError);
  EXPECT_THROW(tree.add_node("a", 1, 0, false), ValueError);
  EXPECT_THROW(tree.add_node("a", 0, -1, true), ValueError);
  EXPECT_THROW(tree.tie(0, 1), ValueError);
  EXPECT_EQ(tree.num_nodes(), 1);
}

TEST(ModuleTree, TiesAreTransitiveAndLedByTheFirst) {
  ModuleTree tree = three_leaves();
  tree.tie(3, 2);
  EXPECT_EQ(tree.first_of_tie(3), 2);
  tree.tie(1, 3);
  EXPECT_EQ(tree.first_of_tie(2), 1);
  EXPECT_EQ(tree.first_of_tie(3), 1);
  EXPECT_EQ(tree.first_of_tie(0), 0);
}

TEST(Assignment, TextNamesTopMostModulesBytesAndShares) {
  const ModuleTree tree = testing::gpt_tree({.num_layers = 4});
  std::vector<int> partition_idxs(tree.num_nodes(), 0);
  const int middle = testing::find_node(tree, "transformer.h.1");
  const int last = testing::find_node(tree, "transformer.ln_f");
  for (int idx = middle; idx < last; ++idx) partition_idxs[idx] = 1;
  EXPECT_EQ(to_text(tree, make_assignment(tree, 3, partition_idxs)),
            "Partition assignments:\n"
            "pp_rank 0: 2412 bytes (40.1 %): (root), (transformer), "
            "transformer.wte, transformer.wpe, (transformer.h), "
            "transformer.h.0, transformer.ln_f, lm_head\n"
            "pp_rank 1: 3600 bytes (59.9 %): transformer.h.[1-3]\n"
            "pp_rank 2: 0 bytes (0.0 %): (no modules)");
}

TEST(Assignment, TextCollapsesOnlyConsecutiveNumbersOfOneStem) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (const char* name : {"h.0", "h.2", "h.3", "g.4", "g", "7", "8"}) {
    tree.add_node(name, 0, 1, true);
  }
  const Assignment assignment =
      make_assignment(tree, 2, {0, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_NE(to_text(tree, assignment).find(": h.0, h.[2-3], g.4, g, [7-8]"),
            std::string::npos)
      << to_text(tree, assignment);
}

TEST(Assignment, HashDependsOnPartitionsAndNames) {
  const ModuleTree tree = three_leaves();
  const uint64_t hash = make_assignment(tree, 2, {0, 0, 1, 1}).hash;
  EXPECT_EQ(make_assignment(tree, 2, {0, 0, 1, 1}).hash, hash);
  EXPECT_NE(make_assignment(tree, 2, {0, 1, 0, 1}).hash, hash);
  EXPECT_NE(make_assignment(tree, 3, {0, 0, 1, 1}).hash, hash);
  ModuleTree renamed;
  renamed.add_node("", -1, 0, false);
  for (const char* name : {"a", "b.0", "c"}) renamed.add_node(name, 0, 1, true);
  EXPECT_NE(make_assignment(renamed, 2, {0, 0, 1, 1}).hash, hash);
}

TEST(Assignment, HashIsTheSameOnEveryMachine) {
  // Computed by hand from the definition of FNV-1a over 2, "", 0.
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  uint64_t expected = 14695981039346656037ull;
  for (unsigned char byte : {2, 0, 0, 0, 0, 0, 0, 0, 0}) {
    expected = (expected ^ byte) * 1099511628211ull;
  }
  EXPECT_EQ(make_assignment(tree, 2, {0}).hash, expected);
}

TEST(Assignment, RejectsWrongCountsPartitionsOutOfRangeAndARootElsewhere) {
  const ModuleTree tree = three_leaves();
  EXPECT_THROW(make_assignment(tree, 2, {0, 0, 1}), ValueError);
  EXPECT_THROW(make_assignment(tree, 2, {0, 0, 1, 2}), ValueError);
  EXPECT_THROW(make_assignment(tree, 2, {0, 0, -1, 1}), ValueError);
  EXPECT_THROW(make_assignment(tree, 2, {1, 0, 1, 1}), ValueError);
}

}  // namespace
}  // namespace smp::partition
