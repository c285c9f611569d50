#pragma once

#include <vector>

#include "csrc/partition/assignment.h"
#include "csrc/partition/module_tree.h"
#include "csrc/partition/objective.h"
#include "csrc/partition/options.h"

namespace smp::partition {

/// Assigns each module to a partition such that the largest load is small. Pure
/// and deterministic.
///
/// Units (see DecisionTree) are in the order of execution: their stages do not
/// fall, and every stage gets a unit. Modules above units follow: a module that
/// is cut is on partition 0, as the root is.
///
/// Units with a requested partition are on it. As long as such wishes keep the
/// order of execution the others are cut around them; where that is not
/// possible, or another visit of a rank costs less, these units are left out of
/// the order.
/// @throws ValueError if there are more stages than units, if no assignment was
///     found that keeps the memory limit, for wishes that contradict each other
///     (check_wishes) or leave a stage without units, or if an option is out of
///     range
/// Source: the tree of modules with costs, and the weight between memory and
/// time, follow arXiv:2111.05972; the cut is ours (unit_split.h).
Assignment solve(const ModuleTree& tree, const PartitionOptions& options);

/// Returns per node the first node of the unit it belongs to; -1 for nodes
/// whose place follows from units.
std::vector<int> unit_places(const ModuleTree& tree);

/// Returns all nodes in the order of execution, parents before children.
std::vector<int> execution_order(const ModuleTree& tree);

/// Returns the assignment with units on their requested partitions, and all
/// other nodes by the rules of `solve`.
/// @param partition_idxs, chunk_idxs  per node; those of units' places count
/// @throws ValueError as make_assignment, or if a node that has to be on
///     partition 0 is requested on another one
Assignment complete(const ModuleTree& tree, int num_partitions,
                    const std::vector<int>& partition_idxs, int num_chunks,
                    const std::vector<int>& chunk_idxs);

/// Returns the costs of an assignment, also of one made by hand.
/// @throws ValueError if it does not fit the tree or the options
Evaluation evaluate(const ModuleTree& tree, const Assignment& assignment,
                    const PartitionOptions& options);

/// Returns the assignment with the subtree of a node, and all that must stay
/// with it, on another partition, as chunk 0 of it; modules above follow the
/// rules of `solve`.
/// @throws ValueError if the node or the partition does not exist, or if the
///     node has to be on partition 0 and another is requested
Assignment move(const ModuleTree& tree, const Assignment& assignment,
                int node_idx, int partition_idx);

/// The reason for the place of a node in an assignment by `solve`.
enum class PlacementRule {
  kDriver,    ///< the root, or pinned to where a split module may have to be
  kAsked,     ///< `other_idx`, itself or in its unit, is requested there
  kUnit,      ///< was free to choose
  kTogether,  ///< with everything below it
  kSplit,     ///< its own code is on partition 0, parts are elsewhere
  kTied,      ///< goes with `other_idx`, with which it must stay
  kFollows,   ///< has no state and goes with `other_idx`, above it
};

struct Placement {
  PlacementRule rule;
  int other_idx;  ///< see the rule; otherwise the node itself
};

Placement explain_placement(const ModuleTree& tree,
                            const Assignment& assignment, int node_idx);

}  // namespace smp::partition
