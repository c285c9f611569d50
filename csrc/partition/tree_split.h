#pragma once

#include <vector>

#include "csrc/partition/decision_tree.h"

namespace smp::partition {

struct TreeSplit {
  std::vector<int> partition_idxs;  ///< per node; see DecisionTree::complete
  std::vector<bool> divided;  ///< the node's children share several partitions
};

/// Walks the tree from the root and cuts each node's partitions among its
/// children in proportion to their costs.
TreeSplit split_tree(const DecisionTree& tree, int num_partitions);

}  // namespace smp::partition
