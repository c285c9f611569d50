#include "csrc/partition/objective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/partition/tree_partitioner.h"
#include "tests/cpp/partition/trees.h"

namespace smp::partition {
namespace {

using testing::find_node;

// A block with a residual sum: x + b(a(x)), then head.
struct Residual {
  Residual() {
    tree.add_node("", -1, 0, false);
    const int list = tree.add_node("h", 0, 0, false, 0, NodeKind::kList);
    block = tree.add_node("h.0", list, 0, false, 2, NodeKind::kPlain, 7);
    a = tree.add_node("h.0.a", block, 100, true, 10, NodeKind::kPlain, 20);
    drop = tree.add_node("h.0.drop", block, 0, false, 0, NodeKind::kPlain, 5);
    b = tree.add_node("h.0.b", block, 100, true, 10, NodeKind::kPlain, 20);
    head = tree.add_node("head", 0, 100, true, 10, NodeKind::kPlain, 20);
    const int x = tree.add_value(0, 8, {a}, false);
    const int from_a = tree.add_value(a, 16, {b}, true);
    const int from_b = tree.add_value(b, 32, {}, true);
    tree.add_value(block, 64, {head}, true, {x, from_b});
    tree.add_value(head, 128, {0}, true);
    EXPECT_EQ(from_a, 1);
  }

  Evaluation on(std::vector<int> unit_partitions, PartitionOptions options) {
    const DecisionTree decisions(tree);
    return Objective(decisions, options)
        .evaluate(decisions.complete(unit_partitions));
  }

  ModuleTree tree;
  int block, a, drop, b, head;
};

TEST(Objective, ModulesThatAreCutAndWhatFollowsThemAreOnTheDriver) {
  Residual model;
  const DecisionTree decisions(model.tree);
  ASSERT_EQ(decisions.num_units(), 3);
  std::vector<int> stages = decisions.complete({1, 1, 0});
  EXPECT_EQ(stages[model.block], 1);
  EXPECT_EQ(stages[model.drop], 1);
  stages = decisions.complete({1, 2, 0});
  EXPECT_EQ(stages[model.block], 0);
  EXPECT_EQ(stages[model.drop], 0);
  EXPECT_TRUE(decisions.is_split(model.block, stages));
}

TEST(Objective, AValueCrossesOnceAndItsGradientComesBack) {
  Residual model;
  // x goes 0 -> 1, the block's sum is made on 1 and goes to the head.
  const Evaluation whole = model.on({1, 1, 2}, {.num_partitions = 3});
  EXPECT_EQ(whole.boundary_bytes,
            (std::vector<int64_t>{0, 8, 128, 0, 0, 64, 128, 64, 0}));
  EXPECT_EQ(whole.crossing_bytes, 8 + 2 * 64 + 2 * 128);
  EXPECT_EQ(whole.transfer_bytes, (std::vector<int64_t>{264, 136, 384}));
  // Copies of what has a gradient are kept where they are read.
  EXPECT_EQ(whole.activation_bytes, (std::vector<double>{128, 52, 84}));
}

TEST(Objective, ASumOfASplitModuleIsMadeWhereItsLatestSourceIs) {
  Residual model;
  const Evaluation split = model.on({0, 1, 1}, {.num_partitions = 2});
  // To 1: x for the sum, what a made; the sum stays there. Back: the output.
  EXPECT_EQ(split.boundary_bytes,
            (std::vector<int64_t>{0, 8 + 16 + 128, 16 + 128, 0}));
}

// A block of a, an activation function of its own code, and b; then the head
// and the loss, in the code of the root.
struct WithLoss {
  WithLoss() {
    tree.add_node("", -1, 0, false, 40, NodeKind::kPlain, 30);
    const int list = tree.add_node("h", 0, 0, false, 0, NodeKind::kList);
    block = tree.add_node("h.0", list, 0, false, 8, NodeKind::kPlain, 6);
    a = tree.add_node("h.0.a", block, 100, true, 10);
    b = tree.add_node("h.0.b", block, 100, true, 10);
    head = tree.add_node("head", 0, 100, true, 10);
    const int labels = tree.add_value(0, 8, {}, false);
    const int x = tree.add_value(0, 8, {a}, false);
    EXPECT_EQ(x, 1);
    const int from_a = tree.add_value(a, 16, {}, true);
    tree.add_value(block, 16, {b}, true, {from_a}, 5, 4);
    tree.add_value(b, 32, {head}, true);
    const int logits = tree.add_value(head, 128, {}, true);
    // Made later than the logits, but on the driver.
    const int moved = tree.add_value(0, 4, {}, false);
    tree.add_value(0, 1, {}, true, {labels, moved, logits}, 40, 30);
  }

  ModuleTree tree;
  int block, a, b, head;
};

TEST(Objective, WhatIsShippedCostsWhereItsFirstArgumentIs) {
  const WithLoss model;
  const DecisionTree decisions(model.tree);
  PartitionOptions options{.num_partitions = 3};
  options.kept_microbatches = {3, 2, 1};
  options.state_factor = 1;
  const Objective objective(decisions, options);
  const Evaluation e = objective.evaluate(decisions.complete({0, 1, 2}));
  EXPECT_EQ(e.compute, (std::vector<double>{10 + 3 + 5, 10, 10 + 40}));
  // The copies that are received, and what the block's own code keeps.
  EXPECT_EQ(e.activation_bytes, (std::vector<double>{2 + 4, 16, 32 + 30}));
  EXPECT_EQ(e.kept_bytes, (std::vector<double>{18, 32, 62}));
  // Both parts of the labels go to the logits, which stay.
  EXPECT_EQ(e.boundary_bytes,
            (std::vector<int64_t>{0, 16, 12, 16, 0, 32, 0, 32, 0}));
  // A block that is not divided has all of its code on its own partition.
  const Evaluation whole = objective.evaluate(decisions.complete({1, 1, 2}));
  EXPECT_EQ(whole.compute, (std::vector<double>{0, 28, 50}));
  EXPECT_EQ(whole.activation_bytes, (std::vector<double>{0, 6, 62}));
}

TEST(Objective, TheLossOfATiedHeadIsKeptNoLongerThanOnTheLastStage) {
  WithLoss model;
  model.tree.tie(model.a, model.head);
  const DecisionTree decisions(model.tree);
  PartitionOptions options{.num_partitions = 2};
  options.kept_microbatches = {8, 1};
  const Evaluation e =
      Objective(decisions, options).evaluate(decisions.complete({0, 1}));
  // The copy of b's result and the loss once, the block's own code 8 times.
  EXPECT_EQ(e.kept_bytes[0], 32 + 30 + 8 * 6);
}

TEST(ModuleTree, CostsOfAValueNeedSourcesAndMustNotBeNegative) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  const int value = tree.add_value(0, 1, {0}, true);
  EXPECT_THROW(tree.add_value(0, 1, {0}, true, {}, 1), ValueError);
  EXPECT_THROW(tree.add_value(0, 1, {0}, true, {value}, -1), ValueError);
  EXPECT_THROW(tree.add_value(0, 1, {0}, true, {value + 1}), ValueError);
}

TEST(Objective, LoadMixesMemoryAndTimeWithTransfers) {
  Residual model;
  model.tree.set_compute_per_byte(0.5);
  PartitionOptions options{.num_partitions = 2, .memory_weight = 0.25};
  options.kept_microbatches = {2, 1};
  options.state_factor = 3;
  const Evaluation e = model.on({0, 0, 1}, options);
  EXPECT_EQ(e.param_bytes, (std::vector<double>{200, 100}));
  EXPECT_EQ(e.compute, (std::vector<double>{22, 10}));
  // The output's copy on 0 is kept as long as it is on 1, where it was made.
  EXPECT_EQ(e.memory_bytes,
            (std::vector<double>{600 + 2 * 52 + 128, 300 + 20 + 64}));
  const double memory = 3 * 300 + 1.5 * 72;
  EXPECT_NEAR(e.loads[0], 0.25 * 832 / memory + 0.75 * (22 + 192) / 32, 1e-12);
  EXPECT_NEAR(e.loads[1], 0.25 * 384 / memory + 0.75 * (10 + 192) / 32, 1e-12);
}

TEST(Objective, ATiedHeadKeepsItsActivationsOnlyAsLongAsTheLastStage) {
  Residual model;
  model.tree.tie(model.a, model.head);
  PartitionOptions options{.num_partitions = 2};
  options.kept_microbatches = {8, 1};
  options.state_factor = 1;
  const Evaluation e = model.on({0, 1}, options);
  // a: 20 eight times; head: 20 once; the sum's copy; the block's own 7.
  EXPECT_EQ(e.memory_bytes[0], 200 + 8 * (20 + 5 + 7) + 20 + 64);
}

TEST(DecisionTree, ExecutionOrderIsThatOfFirstCalls) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (const char* name : {"last", "first", "never", "middle"}) {
    tree.add_node(name, 0, 1, true);
  }
  tree.set_order({2, 4, 1});
  const DecisionTree decisions(tree);
  std::vector<std::string> names;
  for (const DecisionTree::Unit& unit : decisions.units()) {
    names.push_back(tree.node(unit.place_idx).name);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"first", "never", "middle", "last"}));
  EXPECT_THROW(tree.set_order({1, 1}), ValueError);
  EXPECT_THROW(tree.add_node("late", 0, 0, false), ValueError);
}

TEST(DecisionTree, AModuleRegisteredElsewhereSplitsItsOtherParent) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  const int shared = tree.add_node("shared", 0, 10, true);
  const int decoder = tree.add_node("decoder", 0, 0, false);
  tree.add_node("decoder.block", decoder, 10, true);
  tree.add_alias(decoder, shared);
  const DecisionTree decisions(tree);
  EXPECT_EQ(decisions.complete({0, 1}), (std::vector<int>{0, 0, 0, 1}));
  EXPECT_EQ(decisions.complete({1, 1}), (std::vector<int>{0, 1, 1, 1}));
  EXPECT_THROW(tree.add_alias(shared, shared), ValueError);
  EXPECT_THROW(tree.add_alias(decoder, 0), ValueError);
}

TEST(DecisionTree, WhatSharesAParameterWithACutModuleIsPinned) {
  ModuleTree tree;
  tree.add_node("", -1, 50, true);
  tree.add_node("a", 0, 0, true);
  tree.add_node("b", 0, 50, true);
  tree.tie(0, 1);
  const DecisionTree decisions(tree);
  EXPECT_EQ(decisions.num_units(), 2);
  EXPECT_EQ(decisions.free_units(), (std::vector<int>{1}));
  const Assignment assignment = solve(tree, {.num_partitions = 2});
  EXPECT_EQ(assignment.partition_idxs, (std::vector<int>{0, 0, 1}));
  EXPECT_THROW(move(tree, assignment, 1, 1), ValueError);
}

// Ten equal modules. The root reads what the last makes, which costs as much
// as three of them.
TEST(Solve, StagesDoNotFallHoweverLargeTheOutputIs) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 1; i <= 10; ++i) {
    tree.add_node(std::to_string(i), 0, 1000, true, 10);
  }
  for (int i = 1; i <= 10; ++i) {
    tree.add_value(i, i < 10 ? 1 : 150, {i < 10 ? i + 1 : 0}, true);
  }
  tree.set_compute_per_byte(0.1);
  for (const double memory_weight : {0.0, 0.5, 0.8}) {
    for (const int num_partitions : {2, 3, 5}) {
      const std::vector<int> idxs =
          solve(tree, {num_partitions, memory_weight}).partition_idxs;
      EXPECT_TRUE(std::is_sorted(idxs.begin(), idxs.end()));
      EXPECT_EQ(idxs[1], 0);
      EXPECT_EQ(idxs.back(), num_partitions - 1);
    }
  }
}

// Three blocks of an attention and an MLP over two stages, where the middle
// block has to be cut for balance.
TEST(Solve, ALayerThatReadsDataIsOpenedOnlyForMuch) {
  for (const bool reads : {false, true}) {
    // Cutting gains 1 %, 3 %, 8 %, 22 %.
    for (const int64_t half : {50, 160, 500, 2000}) {
      ModuleTree tree;
      tree.add_node("", -1, 0, false);
      const int list = tree.add_node("h", 0, 0, false, 0, NodeKind::kList);
      int mlp = -1;
      for (int i = 0; i < 3; ++i) {
        const int block = tree.add_node("h", list, 0, false);
        const int attn = tree.add_node("a", block, i == 1 ? half : 5000, true);
        const int made = tree.add_value(attn, 1, {}, true);
        if (i != 1) continue;
        mlp = tree.add_node("m", block, half, true);
        tree.add_value(block, 1, {mlp}, true, {made});
        if (reads) tree.add_value(attn, 1, {block}, true);
      }
      const Assignment assignment =
          solve(tree, {.num_partitions = 2, .memory_weight = 1});
      const bool is_cut =
          assignment.partition_idxs[mlp] != assignment.partition_idxs[mlp - 1];
      EXPECT_EQ(is_cut, half > (reads ? 500 : 50)) << reads << " " << half;
    }
  }
}

TEST(Solve, MemoryLimitMovesWorkAndIsRefusedWithFigures) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 8; ++i) {
    tree.add_node(std::to_string(i), 0, 10, true, 10, NodeKind::kPlain, 30);
  }
  PartitionOptions options{.num_partitions = 2, .memory_weight = 0};
  options.kept_microbatches = {3, 1};
  options.state_factor = 1;
  EXPECT_EQ(solve(tree, options).load_bytes, (std::vector<int64_t>{40, 40}));
  options.memory_limits = {300, 300};
  EXPECT_EQ(solve(tree, options).load_bytes, (std::vector<int64_t>{30, 50}));
  options.memory_limits = {150, 150};
  try {
    solve(tree, options);
    FAIL() << "expected ValueError";
  } catch (const ValueError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("pp_rank 1 needs 240 bytes"), std::string::npos)
        << text;
    EXPECT_NE(text.find("90 more than the limit of 150"), std::string::npos);
  }
}

TEST(Solve, TheLeastMemoryIsTakenWhereItNeedNotFit) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 8; ++i) {
    tree.add_node(std::to_string(i), 0, i < 6 ? 10 : 40, true, 10);
  }
  PartitionOptions options{.num_partitions = 2, .memory_weight = 0};
  options.state_factor = 1;
  options.must_fit = false;
  EXPECT_EQ(solve(tree, options).load_bytes, (std::vector<int64_t>{40, 100}));
  options.memory_limits = {60, 60};
  EXPECT_EQ(solve(tree, options).load_bytes, (std::vector<int64_t>{60, 80}));
  options.must_fit = true;
  EXPECT_THROW(solve(tree, options), ValueError);
}

TEST(Solve, WorkIsSpreadBySpeedAndMemoryByLimit) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 16; ++i) {
    tree.add_node(std::to_string(i), 0, 10, true, 10);
  }
  PartitionOptions options{.num_partitions = 3, .memory_weight = 0};
  options.state_factor = 1;
  options.speeds = {1, 2, 1};
  Assignment found = solve(tree, options);
  EXPECT_EQ(found.load_bytes, (std::vector<int64_t>{40, 80, 40}));
  const Evaluation evaluation = evaluate(tree, found, options);
  EXPECT_NEAR(evaluation.loads[0], evaluation.loads[1], 1e-9);
  EXPECT_NEAR(evaluation.loads[0], 1. / 3, 1e-9) << "1 in all on three alike";

  options.memory_limits = {200, 60, 200};
  found = solve(tree, options);
  EXPECT_EQ(found.load_bytes, (std::vector<int64_t>{50, 60, 50}));

  // If only memory counts, each rank has a part of it by its limit.
  options.memory_weight = 1;
  options.memory_limits = {80, 40, 40};
  EXPECT_EQ(solve(tree, options).load_bytes,
            (std::vector<int64_t>{80, 40, 40}));
  options.memory_limits = {40, 20, 20};
  options.must_fit = false;
  EXPECT_EQ(solve(tree, options).load_bytes,
            (std::vector<int64_t>{80, 40, 40}));
}

TEST(Solve, RanksWithoutASpeedOrALimitAreRefused) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  tree.add_node("a", 0, 10, true, 10);
  tree.add_node("b", 0, 10, true, 10);
  PartitionOptions options{.num_partitions = 2};
  for (const std::vector<double>& speeds :
       {std::vector<double>{1}, std::vector<double>{1, 0}}) {
    options.speeds = speeds;
    EXPECT_THROW(solve(tree, options), ValueError);
  }
  options.speeds = {};
  options.memory_limits = {100};
  EXPECT_THROW(solve(tree, options), ValueError);
}

// Eleven equal units on two ranks.
TEST(Solve, RanksInFrontDoMoreWhereTheyDoNotWait) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 11; ++i) {
    tree.add_node(std::to_string(i), 0, 10, true, 10);
  }
  PartitionOptions options{.num_partitions = 2, .memory_weight = 0};
  options.lead_weight = 0.2;
  const Assignment assignment = solve(tree, options);
  EXPECT_EQ(assignment.load_bytes, (std::vector<int64_t>{60, 50}));
  const Evaluation evaluation = evaluate(tree, assignment, options);
  EXPECT_NEAR(evaluation.loads[1], 5. / 11, 1e-9);
  EXPECT_NEAR(evaluation.bounds[1], 5. / 11 + 0.2 * 6 / 11, 1e-9);
  EXPECT_NEAR(evaluation.largest_load, evaluation.bounds[1], 1e-9);
  options.lead_weight = 2;
  EXPECT_THROW(solve(tree, options), ValueError);
}

TEST(Solve, ChunksGoRoundThePartitions) {
  ModuleTree tree;
  tree.add_node("", -1, 0, false);
  for (int i = 0; i < 8; ++i) tree.add_node(std::to_string(i), 0, 10, true);
  const Assignment assignment =
      solve(tree, {.num_partitions = 2, .memory_weight = 1, .num_chunks = 2});
  EXPECT_EQ(assignment.partition_idxs,
            (std::vector<int>{0, 0, 0, 1, 1, 0, 0, 1, 1}));
  EXPECT_EQ(assignment.chunk_idxs,
            (std::vector<int>{0, 0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_NE(to_text(tree, assignment)
                .find("pp_rank 1 chunk 0: 20 bytes (25.0 %): [2-3]"),
            std::string::npos);
  EXPECT_NE(assignment.hash,
            make_assignment(tree, 2, assignment.partition_idxs).hash);
  EXPECT_THROW(solve(tree, {.num_partitions = 3, .num_chunks = 3}), ValueError);
}

TEST(Explain, PlacementsAndMovesFollowTheRules) {
  Residual model;
  const Assignment assignment =
      make_assignment(model.tree, 2, {0, 0, 0, 0, 0, 1, 1});
  auto rule = [&](int idx) {
    return explain_placement(model.tree, assignment, idx).rule;
  };
  EXPECT_EQ(rule(0), PlacementRule::kDriver);
  EXPECT_EQ(rule(model.block), PlacementRule::kSplit);
  EXPECT_EQ(rule(model.b), PlacementRule::kUnit);
  EXPECT_EQ(rule(model.drop), PlacementRule::kFollows);
  EXPECT_EQ(explain_placement(model.tree, assignment, model.drop).other_idx,
            model.block);
  const Assignment moved = move(model.tree, assignment, model.block, 1);
  EXPECT_EQ(moved.partition_idxs, (std::vector<int>{0, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(explain_placement(model.tree, moved, model.block).rule,
            PlacementRule::kTogether);
  EXPECT_THROW(move(model.tree, assignment, model.b, 2), ValueError);
}

TEST(Solve, RejectsBadOptionsOfMemory) {
  const ModuleTree tree = testing::gpt_tree({});
  PartitionOptions options{.num_partitions = 2};
  options.kept_microbatches = {1};
  EXPECT_THROW(solve(tree, options), ValueError);
  options.kept_microbatches = {1, 0};
  EXPECT_THROW(solve(tree, options), ValueError);
  options.kept_microbatches = {};
  options.state_factor = 0.5;
  EXPECT_THROW(solve(tree, options), ValueError);
  EXPECT_THROW(solve(tree, {.num_partitions = 2, .num_chunks = 0}), ValueError);
}

}  // namespace
}  // namespace smp::partition
