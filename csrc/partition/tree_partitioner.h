#pragma once

#include "csrc/partition/assignment.h"
#include "csrc/partition/module_tree.h"

namespace smp::partition {

struct PartitionOptions {
  int num_partitions = 1;
  double memory_weight = 0.8;  ///< 1 balances only memory, 0 only compute
};

/// Assigns each module to a partition such that the loads are balanced. Pure
/// and deterministic; O(num_partitions * children^2) per node.
///
/// The root is on partition 0, nodes tied to each other are together, nodes
/// below which there is no state follow their parent, and every partition gets
/// something.
/// @throws ValueError if there are more partitions than modules which can be
///     placed apart, or an option is out of range
/// Source: the tree algorithm described for automatic model splitting in
/// arXiv:2111.05972, with a refinement of ours (refinement.h).
Assignment solve(const ModuleTree& tree, const PartitionOptions& options);

}  // namespace smp::partition
