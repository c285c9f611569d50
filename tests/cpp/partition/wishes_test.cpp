#include "csrc/partition/wishes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/partition/tree_partitioner.h"
#include "tests/cpp/partition/trees.h"

namespace smp::partition {
namespace {

// Eight equal units, from "0" to "7".
ModuleTree make_chain() {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 8; ++i) {
    tree.add_node(std::to_string(i), 0, 10, true, 10, NodeKind::kPlain, 10);
  }
  return tree;
}

std::vector<int> places_of(const ModuleTree& tree, int num_partitions,
                           int num_chunks = 1) {
  PartitionOptions options{.num_partitions = num_partitions};
  options.num_chunks = num_chunks;
  std::vector<int> idxs = solve(tree, options).partition_idxs;
  return {idxs.begin() + 1, idxs.end()};
}

std::string refusal(const ModuleTree& tree, int num_partitions) {
  try {
    solve(tree, {.num_partitions = num_partitions});
  } catch (const ValueError& e) {
    return e.what();
  }
  return "";
}

TEST(Wishes, TheOrderIsCutAroundThem) {
  ModuleTree tree = make_chain();
  tree.set_wish(4, 1);  // "3", which was on 0
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{0, 0, 0, 1, 1, 1, 1, 1}));
  tree.set_wish(1, 0);
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{0, 0, 0, 1, 1, 1, 1, 1}));
  tree.set_wish(3, 1);  // a quarter on 0: another visit costs less
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{0, 0, 1, 1, 0, 0, 1, 1}));
}

TEST(Wishes, WhatCannotKeepTheOrderIsLeftOutOfIt) {
  ModuleTree tree = make_chain();
  tree.set_wish(1, 1);  // the first one away from the driver
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{1, 0, 0, 0, 0, 1, 1, 1}));
  tree = make_chain();
  tree.set_wish(8, 0);
  tree.set_wish(1, 1);
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{1, 0, 0, 0, 1, 1, 1, 0}));
}

TEST(Wishes, AllModulesMayBeAskedFor) {
  ModuleTree tree = make_chain();
  for (int i = 0; i < 8; ++i) tree.set_wish(i + 1, (i + 1) % 2);
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{1, 0, 1, 0, 1, 0, 1, 0}));
}

TEST(Wishes, APartitionMayHaveNothingButThem) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 3; ++i) tree.add_node(std::to_string(i), 0, 10, true);
  tree.set_wish(1, 2);
  tree.set_wish(2, 1);
  EXPECT_EQ(places_of(tree, 3), (std::vector<int>{2, 1, 0}));
}

TEST(Wishes, WithChunksTheyNameTheRank) {
  ModuleTree tree = make_chain();
  tree.set_wish(3, 1);
  tree.set_wish(4, 0);
  const std::vector<int> places = places_of(tree, 2, 2);
  EXPECT_EQ(places[2], 1);
  EXPECT_EQ(places[3], 0);
  EXPECT_EQ(places[0], 0);
  EXPECT_EQ(places[7], 1);
}

TEST(Wishes, OwnCodeOfAModuleThatIsCutIsWhereItIsAskedFor) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("first", 0, 10, true);
  const int block = tree.add_node("block", 0, 10, true);
  const int a = tree.add_node("block.a", block, 10, true);
  const int b = tree.add_node("block.b", block, 10, true);
  for (int idx : {block, a}) tree.set_wish(idx, 1);
  tree.set_wish(b, 0);
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{0, 1, 1, 0}));
  const Assignment assignment = solve(tree, {.num_partitions = 2});
  const Placement placement = explain_placement(tree, assignment, block);
  EXPECT_EQ(placement.rule, PlacementRule::kAsked);
  EXPECT_EQ(placement.other_idx, block);
  tree.set_wish(a, 0);  // now all below it are elsewhere
  EXPECT_EQ(places_of(tree, 2), (std::vector<int>{1, 1, 0, 0}));
}

TEST(Wishes, ContradictionsAreRefusedByName) {
  ModuleTree tree = make_chain();
  tree.tie(2, 7);
  tree.set_wish(2, 0);
  tree.set_wish(7, 1);
  std::string text = refusal(tree, 2);
  EXPECT_NE(text.find("module '1' is set to partition 0 and '6' to partition "
                      "1, but they must be on one"),
            std::string::npos)
      << text;
  tree = make_chain();
  tree.tie(0, 3);
  tree.set_wish(3, 1);
  text = refusal(tree, 2);
  EXPECT_NE(text.find("module '2' is set to partition 1, but must be on "
                      "partition 0"),
            std::string::npos)
      << text;
  tree = make_chain();
  tree.set_wish(3, 2);
  text = refusal(tree, 2);
  EXPECT_NE(text.find("'2' is set to partition 2, but there are 2 partitions"),
            std::string::npos)
      << text;
}

TEST(Wishes, TooFewOthersAreRefusedByName) {
  ModuleTree tree = make_chain();
  for (int i = 1; i <= 8; ++i) tree.set_wish(i, 1);
  const std::string text = refusal(tree, 2);
  EXPECT_NE(text.find("'0' on 1, '1' on 1, '2' on 1, '3' on 1 and 4 more) "
                      "leave 0 others, too few for 2 partitions"),
            std::string::npos)
      << text;
}

TEST(Wishes, WithALimitTheLimitIsNamed) {
  ModuleTree tree = make_chain();
  tree.set_wish(1, 0);
  PartitionOptions options{.num_partitions = 2};
  options.memory_limits = {100, 100};
  try {
    solve(tree, options);
    FAIL() << "expected ValueError";
  } catch (const ValueError& e) {
    EXPECT_NE(std::string(e.what()).find("the limit of 100"),
              std::string::npos);
  }
}

// The free solution, asked for, is found again; any other wishes are kept and
// leave no partition empty.
TEST(Wishes, HoldInRandomTrees) {
  std::mt19937 random(5);
  int num_kept = 0;
  for (int trial = 0; trial < 400; ++trial) {
    ModuleTree tree = testing::random_tree(random, 30);
    const PartitionOptions options{2 + static_cast<int>(random() % 3),
                                   0.25 * (random() % 5)};
    const DecisionTree decisions(tree);
    if (options.num_partitions > decisions.most_stages()) continue;
    const Assignment free = solve(tree, options);
    ModuleTree again = tree;
    for (const DecisionTree::Unit& unit : decisions.units()) {
      if (unit.pinned || random() % 2 == 0) continue;
      again.set_wish(unit.place_idx, free.partition_idxs[unit.place_idx]);
    }
    EXPECT_LE(evaluate(tree, solve(again, options), options).largest_load,
              1.02 * evaluate(tree, free, options).largest_load)
        << trial;
    ModuleTree other = tree;
    for (const DecisionTree::Unit& unit : decisions.units()) {
      if (unit.pinned || random() % 4 != 0) continue;
      other.set_wish(unit.place_idx,
                     static_cast<int>(random() % options.num_partitions));
    }
    Assignment kept;
    try {
      kept = solve(other, options);
    } catch (const ValueError& e) {
      EXPECT_NE(std::string(e.what()).find("too few for"), std::string::npos)
          << e.what();
      continue;
    }
    ++num_kept;
    std::set<int> used;
    for (const DecisionTree::Unit& unit : decisions.units()) {
      const int wish = other.wish(unit.place_idx);
      const int place = kept.partition_idxs[unit.place_idx];
      if (wish >= 0) {
        EXPECT_EQ(place, wish) << trial;
      }
      used.insert(place);
    }
    EXPECT_EQ(static_cast<int>(used.size()), options.num_partitions) << trial;
  }
  EXPECT_GT(num_kept, 200);
}

}  // namespace
}  // namespace smp::partition
