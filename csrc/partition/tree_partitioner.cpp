#include "csrc/partition/tree_partitioner.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/partition/decision_tree.h"
#include "csrc/partition/unit_split.h"
#include "csrc/partition/wishes.h"

namespace smp::partition {

namespace {

void check_num_stages(const DecisionTree& decisions,
                      const PartitionOptions& options) {
  const int most = decisions.most_stages();
  SMP_CHECK_VALUE(
      options.num_stages() <= most,
      "partition: the model cannot be split into ", options.num_stages(),
      " partitions, because it has ", most,
      " modules with parameters that can be placed apart (modules that share "
      "a parameter count as one); set pipeline_parallel_degree",
      options.num_chunks > 1 ? " times the chunks of each rank" : "",
      " to at most ", most > 0 ? most : 1,
      " or divide the model into more submodules");
}

// Time of a step, in ideal times, if a microbatch visits a rank twice.
constexpr double kCostOfReturn = 1.38;

struct EvaluatedSplit {
  std::vector<int> stages;  // per node
  Evaluation evaluation;
};

std::optional<EvaluatedSplit> cut(const DecisionTree& decisions,
                                  const PartitionOptions& options) {
  const Objective objective(decisions, options);
  const auto unit_stages = split_units(objective);
  if (!unit_stages) return std::nullopt;
  std::vector<int> stages = decisions.complete(*unit_stages);
  Evaluation evaluation = objective.evaluate(stages);
  if (evaluation.excess_bytes > 0) return std::nullopt;
  return EvaluatedSplit{std::move(stages), std::move(evaluation)};
}

std::optional<EvaluatedSplit> best(const DecisionTree& decisions,
                                   const PartitionOptions& options) {
  std::optional<EvaluatedSplit> found = cut(decisions, options);
  if (!decisions.has_wishes()) return found;
  std::optional<EvaluatedSplit> other =
      cut(DecisionTree(decisions.tree(), true), options);
  if (!other) return found;
  const bool pays = !found || other->evaluation.largest_load * kCostOfReturn <
                                  found->evaluation.largest_load;
  return pays ? other : found;
}

// Raises an error that tells by how much the limit is missed even when only
// memory counts.
[[noreturn]] void raise_memory_limit(const DecisionTree& decisions,
                                     PartitionOptions options) {
  options.memory_weight = 1;
  options.lead_weight = 0;
  options.may_exceed = true;
  const Objective objective(decisions, options);
  std::vector<int> stages(decisions.num_nodes(), 0);
  if (options.num_partitions > 1) {
    const auto balanced = best(decisions, options);
    if (!balanced) raise_wishes(decisions, options);
    stages = balanced->stages;
  }
  const Evaluation evaluation = objective.evaluate(stages);
  int most = 0;
  int64_t bytes = 0;
  int64_t limit = 0;
  for (int p = 0; p < options.num_partitions; ++p) {
    const auto own = static_cast<int64_t>(evaluation.memory_bytes[p]);
    if (p > 0 && own - options.memory_limits[p] <= bytes - limit) continue;
    most = p;
    bytes = own;
    limit = options.memory_limits[p];
  }
  throw ValueError(detail::concat(
      rank_prefix(),
      "partition: the model does not fit: even when only memory "
      "is balanced, pp_rank ",
      most, " needs ", bytes, " bytes (parameters times ", options.state_factor,
      " for gradients and optimizer, and activations), ", bytes - limit,
      " more than the limit of ", limit,
      "; use a larger "
      "pipeline_parallel_degree, smaller or fewer active microbatches, or "
      "checkpoint activations"));
}

Assignment from_stages(const ModuleTree& tree, const PartitionOptions& options,
                       const std::vector<int>& stages) {
  std::vector<int> partition_idxs;
  std::vector<int> chunk_idxs;
  for (int stage : stages) {
    partition_idxs.push_back(stage % options.num_partitions);
    chunk_idxs.push_back(stage / options.num_partitions);
  }
  return make_assignment(tree, options.num_partitions,
                         std::move(partition_idxs), options.num_chunks,
                         std::move(chunk_idxs));
}

std::vector<int> stages_of(const ModuleTree& tree,
                           const Assignment& assignment) {
  SMP_CHECK_VALUE(
      static_cast<int>(assignment.partition_idxs.size()) == tree.num_nodes(),
      "partition: the assignment has ", assignment.partition_idxs.size(),
      " modules, the tree ", tree.num_nodes());
  std::vector<int> stages;
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    stages.push_back(assignment.stage(idx));
  }
  return stages;
}

}  // namespace

Assignment solve(const ModuleTree& tree, const PartitionOptions& options) {
  SMP_CHECK_VALUE(tree.num_nodes() > 0, "partition: the module tree is empty");
  check_options(options);
  check_wishes(tree, options.num_partitions);
  const DecisionTree decisions(tree);
  std::optional<EvaluatedSplit> found;
  if (options.num_partitions == 1) {
    // Several stages of one partition would wait for themselves.
    std::vector<int> stages(tree.num_nodes(), 0);
    Evaluation evaluation = Objective(decisions, options).evaluate(stages);
    if (evaluation.excess_bytes == 0 || !options.must_fit) {
      found = EvaluatedSplit{std::move(stages), std::move(evaluation)};
    }
  } else {
    check_num_stages(decisions, options);
    found = best(decisions, options);
    if (!found && options.is_limited()) {
      PartitionOptions memory_only = options;
      memory_only.memory_weight = 1;
      memory_only.lead_weight = 0;
      found = best(decisions, memory_only);
      if (!found && !options.must_fit) {
        memory_only.may_exceed = true;
        found = best(decisions, memory_only);
      }
    }
  }
  if (!found) raise_memory_limit(decisions, options);
  return from_stages(tree, options, found->stages);
}

std::vector<int> unit_places(const ModuleTree& tree) {
  const DecisionTree decisions(tree);
  std::vector<int> places;
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    const int id = decisions.unit_of(idx);
    places.push_back(id >= 0 ? decisions.units()[id].place_idx : -1);
  }
  return places;
}

std::vector<int> execution_order(const ModuleTree& tree) {
  return DecisionTree(tree).order();
}

Assignment complete(const ModuleTree& tree, int num_partitions,
                    const std::vector<int>& partition_idxs, int num_chunks,
                    const std::vector<int>& chunk_idxs) {
  // Checks ranges; the root is on partition 0 regardless of the request.
  std::vector<int> asked = partition_idxs;
  std::vector<int> asked_chunks = chunk_idxs;
  if (!asked.empty()) asked[0] = 0;
  if (!asked_chunks.empty()) asked_chunks[0] = 0;
  const Assignment wish =
      make_assignment(tree, num_partitions, asked, num_chunks, asked_chunks);
  const DecisionTree decisions(tree);
  const std::vector<int> unit_stages =
      decisions.stages_of_units(stages_of(tree, wish));
  for (int id = 0; id < decisions.num_units(); ++id) {
    const DecisionTree::Unit& unit = decisions.units()[id];
    SMP_CHECK_VALUE(!unit.pinned || unit_stages[id] == 0, "partition: '",
                    tree.node(unit.place_idx).name,
                    "' must be on partition 0, "
                    "because it shares a parameter with a module that may have "
                    "to run there; got ",
                    unit_stages[id] % num_partitions);
  }
  PartitionOptions options;
  options.num_partitions = num_partitions;
  options.num_chunks = num_chunks;
  return from_stages(tree, options, decisions.complete(unit_stages));
}

Evaluation evaluate(const ModuleTree& tree, const Assignment& assignment,
                    const PartitionOptions& options) {
  check_options(options);
  SMP_CHECK_VALUE(assignment.num_partitions == options.num_partitions &&
                      assignment.num_chunks == options.num_chunks,
                  "partition: the assignment is for ",
                  assignment.num_partitions, " partitions of ",
                  assignment.num_chunks, " chunks, the options are for ",
                  options.num_partitions, " of ", options.num_chunks);
  const DecisionTree decisions(tree);
  return Objective(decisions, options).evaluate(stages_of(tree, assignment));
}

Assignment move(const ModuleTree& tree, const Assignment& assignment,
                int node_idx, int partition_idx) {
  const ModuleTree::Node& node = tree.checked_node(node_idx);
  SMP_CHECK_VALUE(
      partition_idx >= 0 && partition_idx < assignment.num_partitions,
      "partition ", partition_idx, " must be in [0, ",
      assignment.num_partitions, ")");
  const DecisionTree decisions(tree);
  std::vector<int> unit_stages =
      decisions.stages_of_units(stages_of(tree, assignment));
  const int owner = decisions.owner(node_idx);
  std::vector<int> moved = decisions.below(owner);
  if (decisions.unit_of(owner) >= 0) moved.push_back(decisions.unit_of(owner));
  for (int id : moved) {
    SMP_CHECK_VALUE(partition_idx == 0 || !decisions.units()[id].pinned,
                    "partition: '", node.name, "' cannot move to partition ",
                    partition_idx,
                    ", because it shares a parameter with a "
                    "module that runs on partition 0");
    unit_stages[id] = partition_idx;
  }
  PartitionOptions options;
  options.num_partitions = assignment.num_partitions;
  options.num_chunks = assignment.num_chunks;
  return from_stages(tree, options, decisions.complete(unit_stages));
}

Placement explain_placement(const ModuleTree& tree,
                            const Assignment& assignment, int node_idx) {
  tree.checked_node(node_idx);
  const std::vector<int> stages = stages_of(tree, assignment);
  const DecisionTree decisions(tree);
  if (node_idx == 0) return {PlacementRule::kDriver, node_idx};
  const int id = decisions.unit_of(node_idx);
  if (id >= 0) {
    const DecisionTree::Unit& unit = decisions.units()[id];
    const int partition_idx = assignment.partition_idxs[node_idx];
    if (!unit.pinned && unit.wish == partition_idx) {
      const bool itself = tree.wish(node_idx) == partition_idx;
      return {PlacementRule::kAsked,
              itself ? node_idx : asked_node(decisions, id)};
    }
    if (unit.place_idx != node_idx) {
      return {PlacementRule::kTied, unit.place_idx};
    }
    if (unit.pinned) return {PlacementRule::kDriver, node_idx};
    return {PlacementRule::kUnit, node_idx};
  }
  if (decisions.owner(node_idx) != node_idx) {
    return {PlacementRule::kFollows, decisions.owner(node_idx)};
  }
  if (tree.wish(node_idx) == assignment.partition_idxs[node_idx]) {
    return {PlacementRule::kAsked, node_idx};
  }
  return {decisions.is_split(node_idx, stages) ? PlacementRule::kSplit
                                               : PlacementRule::kTogether,
          node_idx};
}

}  // namespace smp::partition
